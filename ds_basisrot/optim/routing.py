"""Which parameters of a model are rotated, and as which matrices: by patterns on names, else by tags, else by the modules that own them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from .layout import parts
from .modules import EMPTY, Entry, Route, is_linear, is_vector, routes_by_module
from .options import check_layout, check_patterns

__all__ = ["Route", "check_patterns_match", "describe", "is_linear", "named_rotation", "param_groups", "pattern_matches", "route", "tag"]

Patterns = Mapping[str, Any]  # {"include": [...], "exclude": [...], "layout": {pattern: layout}}

INCLUDED = Route(True, "included by pattern")
EXCLUDED = Route(False, "excluded by pattern")
TAGGED_OUT = Route(False, "tagged not to be rotated")

# Attribute of a tagged parameter: its entry.
TAG = "_basis_rotation"


def tag(
    parameter: Tensor,
    *,
    rotate: bool = True,
    rows: Sequence[int] | None = None,
    groups: int | None = None,
    names: Sequence[str] | None = None,
    transposed: bool | None = None,
    kind: str | None = None,
) -> Tensor:
    """Say in code how a parameter is rotated: `tag(self.qkv.weight, rows=[n, n, n])`, or `tag(self.gate.weight, rotate=False)`.

    A tag wins over what the module says, and loses to the patterns of the configuration. It is an attribute of the parameter, and deep
    copies of a module lose it: tag parameters where the model is in its final form.

    Args:
        parameter: the parameter.
        rotate: False leaves it to AdamW.
        rows, groups, names, transposed, kind: its layout, as in `layout.parts`.

    Returns:
        The parameter.

    Raises:
        ValueError: a layout that is illegal or does not fit the parameter.
    """
    if not isinstance(parameter, Tensor):
        raise ValueError(f"tag: takes a parameter, such as module.weight, got {type(parameter).__name__}")
    if not isinstance(rotate, bool):
        raise ValueError(f"tag: rotate must be true or false, got {rotate!r}")
    given = {"rows": rows, "groups": groups, "names": names, "transposed": transposed, "kind": kind}
    layout = {key: value for key, value in given.items() if value is not None}
    if not rotate and layout:
        raise ValueError(f"tag: rotate=False takes no {next(iter(layout))}")
    check_layout(layout, "tag")
    if rotate and parameter.numel():  # empty: a parameter whose weight is elsewhere
        try:
            parts(parameter.shape, layout)
        except ValueError as error:
            raise ValueError(f"tag: {error}") from None
    setattr(parameter, TAG, rotate and _plain(layout))
    return parameter


def route(model: nn.Module, patterns: Patterns | None = None, *, holds_output: bool = True) -> dict[str, Route]:
    """Route every trainable parameter of `model`: by pattern, else by tag, else by the module that owns it.

    Rotated are the weights of linear maps (`nn.Linear`, any module with `in_features`, `out_features` and a weight of that shape,
    Megatron's tensor-parallel ones, Hugging Face's `Conv1D`; the router of a mixture of experts too, where it is such a module), of
    convolutions, of `nn.MultiheadAttention`, LoRA matrices, and stacked weights `[experts, m, n]` of expert modules. Q, K and V in one
    weight are three matrices, a gate and an up projection in one weight are two (see `fused`). Weights of `nn.Embedding`, weights tied to
    one, and the output head are not rotated, nor are matrices with a single row or column.

    The output head is what the model itself names (`get_output_embeddings()`); else the linear map outside of repeated blocks with as many
    outputs as the largest embedding has rows; else the last linear map in definition order, if it is outside of repeated blocks. Only a
    part of a model that `holds_output` has one.

    Args:
        model: the model, or the part of it that a pipeline stage holds; its parameters may be on the meta device.
        patterns: {"include": [...], "exclude": [...], "layout": {pattern: layout}}, shell-style patterns on parameter names. They win over
            tags and modules: exclude over layout, and layout over include. A layout includes the parameter.
        holds_output: False for a part of a model that ends before the output.

    Returns:
        A route for the name of each trainable parameter, in definition order.

    Raises:
        ValueError: an included parameter that holds no matrices, or a layout that does not fit its parameter.
    """
    parameters = dict(model.named_parameters())
    return {
        name: _by_pattern(name, parameters[name], patterns, _by_tag(parameters[name]) or by_module)
        for name, by_module in routes_by_module(model, holds_output).items()
    }


def pattern_matches(patterns: Patterns | None, names: Iterable[str]) -> dict[str, int]:
    """How many of `names` each pattern matches, by "rotate.include: 'pattern'", and "rotate.exclude" and "rotate.layout" likewise."""
    names = list(names)
    return {
        f"rotate.{kind}: {pattern!r}": sum(fnmatchcase(name, pattern) for name in names)
        for kind, listed in (patterns or {}).items()
        for pattern in listed
    }


def check_patterns_match(patterns: Patterns | None, names: Iterable[str]) -> None:
    """Refuse a pattern that matches none of `names`.

    Raises:
        ValueError: naming the pattern.
    """
    for pattern, matches in pattern_matches(patterns, names).items():
        if matches == 0:
            raise ValueError(f"{pattern} matches no parameter; see the names in model.named_parameters()")


def _by_pattern(name: str, parameter: Tensor, patterns: Patterns | None, otherwise: Route) -> Route:
    """The route that patterns give, or else another; that also says as which matrices an included parameter is rotated."""
    patterns = patterns or {}
    if any(fnmatchcase(name, pattern) for pattern in patterns.get("exclude", ())):
        return EXCLUDED
    if parameter.numel() == 0:
        return EMPTY
    for pattern, layout in patterns.get("layout", {}).items():
        if fnmatchcase(name, pattern):
            try:
                parts(parameter.shape, layout)
            except ValueError as error:
                raise ValueError(f"rotate.layout: {pattern!r} matches {name}: {error}") from None
            return Route(True, "layout by pattern", _plain(layout))
    for pattern in patterns.get("include", ()):
        if fnmatchcase(name, pattern) and not otherwise.rotate:
            if not 2 <= parameter.ndim <= 5:
                raise ValueError(f"rotate.include: {pattern!r} matches {name}, which has shape {list(parameter.shape)} and is not a matrix")
            return INCLUDED
    return otherwise


def _by_tag(parameter: Tensor) -> Route | None:
    layout = getattr(parameter, TAG, None)
    if layout is None:
        return None
    return TAGGED_OUT if layout is False else Route(True, "tagged", layout)


def _plain(layout: Mapping[str, Any]) -> Entry:
    """A layout as lists, strings and numbers of its own, which any checkpoint can hold."""
    return {key: list(value) if isinstance(value, (list, tuple)) else value for key, value in layout.items()} or True


def param_groups(model: nn.Module, *, rotate: Patterns | None = None, holds_output: bool = True) -> list[dict]:
    """Parameter groups for a plain PyTorch loop: `BasisRotation(param_groups(model), lr=...)`.

    Args:
        model: the model.
        rotate: {"include": [...], "exclude": [...], "layout": {pattern: layout}}, as in `route`.
        holds_output: False for a part of a model that ends before the output, such as a pipeline stage that is not the last.

    Returns:
        At most two groups of named parameters, the rotated ones and the rest, each with its `rotate`: entries, or False.

    Raises:
        ValueError: illegal patterns, a pattern that matches nothing, a layout that does not fit, or nothing to rotate.
    """
    check_patterns(rotate)
    if holds_output:  # a pattern may be meant for another part
        check_patterns_match(rotate, [name for name, _ in model.named_parameters()])
    routes, parameters = route(model, rotate, holds_output=holds_output), dict(model.named_parameters())
    rotated, others = ([(name, parameters[name]) for name in routes if routes[name].rotate is flag] for flag in (True, False))
    if not rotated:
        raise ValueError(f"nothing would be rotated: {describe(routes)}; name matrices with rotate.include, or use AdamW")
    groups = [{"params": rotated, "rotate": [routes[name].entry for name, _ in rotated]}, {"params": others, "rotate": False}]
    return [group for group in groups if group["params"]]


def named_rotation(
    parameters: Sequence[Tensor], names: Sequence[str] | None, rotate: Entry | Sequence[Entry] | None, patterns: Patterns
) -> tuple[Entry, ...]:
    """Rotation entries of a parameter group, False, True or a layout for each parameter: its `rotate`, then the patterns on names.

    Without `rotate` (None), what is tagged follows its tag, and of the rest every matrix `[m, n]` is rotated. A parameter without elements
    is not rotated.

    Raises:
        ValueError: entries that do not fit, patterns without names, or an entry for a parameter that holds no such matrices.
    """
    if rotate is None:
        entries = [_default_entry(p) for p in parameters]
    elif _is_entry(rotate):
        entries = [rotate] * len(parameters)
    elif isinstance(rotate, (list, tuple)) and len(rotate) == len(parameters) and all(map(_is_entry, rotate)):
        entries = list(rotate)
    else:
        raise ValueError(
            f"rotate of a parameter group: must be true, false, a layout or a list of {len(parameters)} of them, got {rotate!r}"
        )
    if patterns and names is None:
        raise ValueError(
            "rotate: include and exclude patterns need names, and so do layouts: "
            "pass model.named_parameters() or ds_basisrot.param_groups(model)"
        )
    names = names or [f"parameter {index}" for index in range(len(parameters))]
    for index, (p, name, entry) in enumerate(zip(parameters, names, entries)):
        if isinstance(entry, Mapping):
            entry = _plain(entry)
        entry = _by_pattern(name, p, patterns, Route(entry is not False, "rotate of its group", entry)).entry
        try:
            parts(p.shape, entry)
        except ValueError as error:
            raise ValueError(f"rotate: {name}: {error}") from None
        entries[index] = entry
    return tuple(entries)


def _is_entry(value: Any) -> bool:
    return isinstance(value, (bool, Mapping))


def _default_entry(parameter: Tensor) -> Entry:
    tagged = _by_tag(parameter)
    if tagged is not None:
        return tagged.entry
    return parameter.ndim == 2 and not is_vector(parameter, True)


def describe(routes: Mapping[str, Route]) -> str:
    """One line with how many parameters are rotated and how many are not, by reason."""

    def count(flag: bool) -> str:
        reasons = Counter(r.reason for r in routes.values() if r.rotate is flag)
        listed = ", ".join(f"{number} {reason}" for reason, number in reasons.items())
        return f"{sum(reasons.values())}" + (f" ({listed})" if listed else "")

    return f"rotated: {count(True)}; AdamW: {count(False)}"
