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
    original = _original(getattr(module, name))
    replacement = make(original)
    setattr(replacement, REPLACED, original)
    return _bind(name, original, replacement)


def restore(module: Any, name: str) -> None:
    """Put what `replace` had replaced back in all its places."""
    original = _original(getattr(module, name))
    _bind(name, original, original)


def replace_method(owner: type, name: str, make: Callable[[Callable], Callable]) -> None:
    """Put `make(original)` in the place of a method."""
    original = _original(getattr(owner, name))
    replacement = make(original)
    setattr(replacement, REPLACED, original)
    setattr(owner, name, replacement)


def restore_method(owner: type, name: str) -> None:
    """Put what `replace_method` had replaced back."""
    setattr(owner, name, _original(getattr(owner, name)))


def _original(bound: Callable) -> Callable:
    return getattr(bound, REPLACED, bound)


def _bind(name: str, original: Callable, function: Callable) -> list[str]:
    """Bind `function` wherever `original`, or a replacement of it, is bound; the names of those modules."""
    places = []
    for module_name, each in list(sys.modules.items()):
        bound = getattr(each, "__dict__", {}).get(name)
        if bound is not None and _original(bound) is original:
            setattr(each, name, function)
            places.append(module_name)
    return places
