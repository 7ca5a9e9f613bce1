"""The options of BasisRotation: their legal ranges, and one-line errors that name the option and say what to do."""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from .eigenbasis import GEOMETRIES, SOURCES
from .refresh import ALLOCATIONS


def check_names(given: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Refuse a name that is not valid, with the closest valid one.

    Raises:
        ValueError: naming `where`, the unknown name, and the closest valid name or all of them.
    """
    valid = list(valid)
    for name in given:
        if name not in valid:
            raise ValueError(f"{where}: unknown key {name!r}; {closest(name, valid)}")


def check_group_keys(group: Mapping[str, Any], options: Iterable[str]) -> None:
    """Refuse a key of a parameter group that is nearly an option; other strangers are the user's own, as in every torch optimizer.

    Raises:
        ValueError: with the option it is close to.
    """
    options = list(options)
    for key in group:
        if key in (*options, "params", "param_names", "routed"):
            continue
        if key == "layout":
            raise ValueError("parameter group: 'layout' has no meaning there; put layouts into 'rotate', one entry for each parameter")
        match = difflib.get_close_matches(str(key).lower(), options, n=1, cutoff=0.85)
        if match:
            raise ValueError(f"parameter group: unknown key {key!r}; did you mean {match[0]!r}?")


def closest(name: str, valid: list[str]) -> str:
    """'did you mean ...?' with the closest valid name, or the list of valid names when none is close."""
    match = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.6)
    return f"did you mean {match[0]!r}?" if match else f"valid: {', '.join(valid)}"


def check_options(options: Mapping[str, Any]) -> None:
    """Check the values of a parameter group's options.

    Raises:
        ValueError: with the option's name, its value and the legal values.
    """
    for name, (is_legal, legal) in LEGAL.items():
        if name in options and not is_legal(options[name]):
            raise ValueError(f"{name}: must be {legal}, got {options[name]!r}{_choice_hint(name, options[name])}")


def _choice_hint(name: str, value: Any) -> str:
    match = difflib.get_close_matches(str(value), CHOICES.get(name, ()), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _at_least_zero(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_decay(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_lr(value: Any) -> bool:
    if hasattr(value, "numel"):
        return value.numel() == 1 and _at_least_zero(float(value))
    return _at_least_zero(float(value)) if hasattr(value, "item") else _at_least_zero(value)


def _is_strings(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


def _is_patterns(value: Any) -> bool:
    if not isinstance(value, Mapping) or not set(value) <= {"include", "exclude", "layout"}:
        return False
    layouts = value.get("layout", {})
    is_layouts = isinstance(layouts, Mapping) and all(isinstance(key, str) and isinstance(each, Mapping) for key, each in layouts.items())
    return is_layouts and all(_is_strings(value.get(kind, ())) for kind in ("include", "exclude"))


DTYPES = ("float32", "bfloat16")

CHOICES = {
    "geometry": GEOMETRIES,
    "source": SOURCES,
    "refresh_allocation": ALLOCATIONS,
    "state_dtype": DTYPES,
    "product_dtype": DTYPES,
}

LEGAL = {
    "lr": (_is_lr, "a number >= 0"),
    "betas": (lambda v: isinstance(v, (list, tuple)) and len(v) == 2 and all(map(_is_decay, v)), "two numbers in [0, 1)"),
    "eps": (_at_least_zero, "a number >= 0"),
    "weight_decay": (_at_least_zero, "a number >= 0"),
    "refresh_period": (_is_positive_int, "an integer >= 1 (updates)"),
    "staleness": (_at_least_zero, "a number >= 0 (updates)"),
    "auto_budget": (lambda v: _is_number(v) and v >= 1, "a number >= 1"),
    "stagger": (lambda v: isinstance(v, bool), "true or false"),
    "covariance_beta": (lambda v: v is None or _is_decay(v), "a number in [0, 1), or null for betas[1]"),
    "covariance_damping": (_at_least_zero, "a number >= 0"),
    "noise_floor": (lambda v: v is None or _at_least_zero(v), "a number >= 0, or null for the default"),
    "max_dim": (_is_positive_int, "an integer >= 1"),
    **{name: (lambda v, values=values: v in values, "one of " + ", ".join(values)) for name, values in CHOICES.items()},
}


def check_patterns(rotate: Any) -> None:
    """Check the optimizer's `rotate` option: shell-style patterns on parameter names, and the layouts of those that match.

    Raises:
        ValueError: when it is not a mapping of the two pattern lists and the layouts, or a layout is none.
    """
    if rotate is None:
        return
    if isinstance(rotate, Mapping):
        check_names(rotate, ("include", "exclude", "layout"), "rotate")
    if not _is_patterns(rotate):
        raise ValueError(
            'rotate: must be {"include": [...], "exclude": [...], "layout": {pattern: {...}}} with patterns on parameter names, '
            f"got {rotate!r}"
        )
    for pattern, layout in rotate.get("layout", {}).items():
        check_layout(layout, f"rotate.layout: {pattern!r}")


# Kind of a parameter that holds matrices -> the numbers of dimensions it may have.
KINDS = {"matrix": (2,), "stack": (3,), "convolution": (3, 4, 5), "columns": (3,)}

LAYOUT = {
    "rows": (
        lambda v: isinstance(v, (list, tuple)) and len(v) > 0 and all(map(_is_positive_int, v)),
        "a list of integers >= 1, the rows of each block",
    ),
    "groups": (_is_positive_int, "an integer >= 1"),
    "names": (lambda v: _is_strings(v) and len(set(v)) == len(v), "a list of different names, one for each block of rows"),
    "transposed": (lambda v: isinstance(v, bool), "true or false"),
    "kind": (lambda v: isinstance(v, str) and v in KINDS, "one of " + ", ".join(KINDS)),
}


def check_layout(layout: Mapping[str, Any], where: str) -> None:
    """Check the keys and values of a parameter's layout (see `layout.parts`), whatever the parameter.

    Raises:
        ValueError: naming `where` and the key.
    """
    check_names(layout, LAYOUT, where)
    for key, value in layout.items():
        is_legal, legal = LAYOUT[key]
        if not is_legal(value):
            hint = f"; {closest(value, list(KINDS))}" if key == "kind" and isinstance(value, str) else ""
            raise ValueError(f"{where}: {key} must be {legal}, got {value!r}{hint}")
    if "groups" in layout and "rows" not in layout:
        raise ValueError(f"{where}: groups needs rows, the rows of each block of one group")
    blocks = len(layout.get("rows", (1,)))
    if "names" in layout and len(layout["names"]) != blocks:
        raise ValueError(f"{where}: names must be as many as blocks of rows, {blocks}, got {layout['names']!r}")
