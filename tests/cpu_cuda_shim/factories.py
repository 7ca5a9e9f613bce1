"""Functions that make tensors: device='cuda' and device=torch.cuda.current_device() mean the CPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .callers import names_cuda, stand_in

FACTORIES = """arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like randint
randn randn_like randperm tensor tril_indices triu_indices zeros zeros_like""".split()


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The factory, with the CPU in the place of a GPU. Pinned memory needs a GPU's driver, so memory is not pinned."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if names_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def install() -> None:
    """Patch torch's factories and the methods of tensors that make others."""
    for name in FACTORIES:
        stand_in(torch, name, on_cpu(getattr(torch, name)))
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        stand_in(torch.Tensor, name, on_cpu(getattr(torch.Tensor, name)))
