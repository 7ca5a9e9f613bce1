"""Who gets the stand-ins: everyone but the packages under test."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

UNDER_TEST = ("ds_basisrot", "megatron_patches")


def stand_in(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Put `replacement` in the place of `owner.name`; the packages under test go on calling the original.

    Args:
        owner: module or class. A name that this version of torch does not have is added.
        name: of a function or method.
        replacement: takes the same arguments.
    """
    original = getattr(owner, name, replacement)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return (original if package in UNDER_TEST else replacement)(*args, **kwargs)

    setattr(owner, name, call)


def names_cuda(device: Any) -> bool:
    """Whether a value given as a device means a GPU: 'cuda:1', torch.device('cuda') or an index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)
