"""Moving tensors and modules: to a GPU means to stay where they are."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .callers import names_cuda, stand_in


def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`.cuda()` and `.pin_memory()`."""
    return self


def to_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    """`.to()`, with the CPU in the place of a GPU."""

    @functools.wraps(move)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(torch.device("cpu") if names_cuda(argument) else argument for argument in args)
        if names_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        return move(self, *args, **kwargs)

    return to


def gpu_type(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """`.type()`, naming GPU types: Megatron sorts parameters by names like 'torch.cuda.BFloat16Tensor'."""

    @functools.wraps(type_of)
    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return named


def install() -> None:
    """Patch the methods of tensors and modules."""
    for owner in (torch.Tensor, torch.nn.Module):
        stand_in(owner, "cuda", stay)
        stand_in(owner, "to", to_cpu(owner.to))
    stand_in(torch.Tensor, "pin_memory", stay)
    stand_in(torch.Tensor, "record_stream", lambda self, stream: None)
    stand_in(torch.Tensor, "type", gpu_type(torch.Tensor.type))
