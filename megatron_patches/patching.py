"""Replaces functions wherever they are bound: scripts and packages say `from ... import name`."""

import sys
from collections.abc import Callable
from typing import Any

REPLACED = "__megatron_patches_original__"


def replace(module: Any, name: str, make: Callable[[Callable], Callable]) -> list[str]:
    """Put `make(original)` in the place of `module.name`, and of every other binding of it in modules that are imported by now.

    Returns:
        The names of the modules where it was bound.
    """
    original = getattr(module, name)
    original = getattr(original, REPLACED, original)
    replacement = make(original)
    setattr(replacement, REPLACED, original)
    places = []
    for module_name, each in list(sys.modules.items()):
        bound = getattr(each, "__dict__", {}).get(name)
        if bound is not None and getattr(bound, REPLACED, bound) is original:
            setattr(each, name, replacement)
            places.append(module_name)
    return places


def replace_method(owner: type, name: str, make: Callable[[Callable], Callable]) -> None:
    """Put `make(original)` in the place of a method."""
    bound = getattr(owner, name)
    original = getattr(bound, REPLACED, bound)
    replacement = make(original)
    setattr(replacement, REPLACED, original)
    setattr(owner, name, replacement)
