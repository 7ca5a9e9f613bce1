"""Which parameters of a model are rotated: weights of linear maps and of experts, told by module; not embeddings, not the output head."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from .options import check_patterns


@dataclass(frozen=True)
class Route:
    """Where one parameter goes: rotated or plain AdamW, and why."""

    rotate: bool
    reason: str


LINEAR = Route(True, "linear weight")
ATTENTION = Route(True, "attention input projection")
EXPERTS = Route(True, "stacked expert weights")
EMBEDDING = Route(False, "embedding")
OUTPUT_HEAD = Route(False, "output head")
VECTOR = Route(False, "norm or bias")
OTHER = Route(False, "not the weight of a linear map")
INCLUDED = Route(True, "included by pattern")
EXCLUDED = Route(False, "excluded by pattern")


def route(model: nn.Module, patterns: Mapping[str, Sequence[str]] | None = None, *, holds_output: bool = True) -> dict[str, Route]:
    """Route every trainable parameter of `model` by the module that owns it.

    A weight is rotated when its module is a linear map (`nn.Linear`, or any module with `in_features`, `out_features` and a weight of that
    shape), when it is an input projection of `nn.MultiheadAttention`, or when it is a stacked weight `[experts, m, n]` of an expert module.
    Weights of `nn.Embedding`, weights tied to one, and the output head are not.

    The output head is what the model itself names (`get_output_embeddings()`); else the linear map outside of repeated blocks with as many
    outputs as the largest embedding has rows; else the last linear map in definition order, if it is outside of repeated blocks. Only a
    part of a model that `holds_output` has one.

    Args:
        model: the model, or the part of it that a pipeline stage holds.
        patterns: {"include": [...], "exclude": [...]}, shell-style, on parameter names; they win over the modules, exclude over include.
        holds_output: False for a part of a model that ends before the output.

    Returns:
        A route for the name of each trainable parameter, in definition order.

    Raises:
        ValueError: an included parameter is not a matrix.
    """
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters(recurse=False)}
    heads = _output_heads(model) if holds_output else set()
    routes = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if not parameter.requires_grad or name in routes:
                continue
            routes[name] = _by_pattern(name, parameter, patterns) or _by_module(module, parameter, embeddings, heads)
    first_names = dict(model.named_parameters())  # one name for a parameter that several modules share
    return {name: routes[name] for name in first_names if name in routes}


def pattern_matches(patterns: Mapping[str, Sequence[str]] | None, names: Iterable[str]) -> dict[str, int]:
    """How many of `names` each pattern matches, by "rotate.include: 'pattern'" or "rotate.exclude: 'pattern'"."""
    names = list(names)
    return {
        f"rotate.{kind}: {pattern!r}": sum(fnmatchcase(name, pattern) for name in names)
        for kind, listed in (patterns or {}).items()
        for pattern in listed
    }


def check_patterns_match(patterns: Mapping[str, Sequence[str]] | None, names: Iterable[str]) -> None:
    """Refuse a pattern that matches none of `names`.

    Raises:
        ValueError: naming the pattern.
    """
    for pattern, matches in pattern_matches(patterns, names).items():
        if matches == 0:
            raise ValueError(f"{pattern} matches no parameter; see the names in model.named_parameters()")


def _by_pattern(name: str, parameter: Tensor, patterns: Mapping[str, Sequence[str]] | None) -> Route | None:
    patterns = patterns or {}
    if any(fnmatchcase(name, pattern) for pattern in patterns.get("exclude", ())):
        return EXCLUDED
    for pattern in patterns.get("include", ()):
        if fnmatchcase(name, pattern):
            if parameter.ndim not in (2, 3):
                raise ValueError(f"rotate.include: {pattern!r} matches {name}, which has shape {list(parameter.shape)} and is not a matrix")
            return INCLUDED
    return None


def _by_module(module: nn.Module, parameter: Tensor, embeddings: set[int], heads: set[int]) -> Route:
    if id(parameter) in embeddings:
        return EMBEDDING
    if id(parameter) in heads:
        return OUTPUT_HEAD
    if parameter.ndim < 2:
        return VECTOR
    if is_linear(module) and parameter is module.weight:
        return LINEAR
    if isinstance(module, nn.MultiheadAttention) and parameter.ndim == 2:
        return ATTENTION
    if parameter.ndim == 3 and _is_expert_class(type(module)):
        return EXPERTS
    return OTHER


def is_linear(module: nn.Module) -> bool:
    """True for a module that multiplies by a weight `[out_features, in_features]`, whatever class it has."""
    if isinstance(module, nn.Linear):
        return True
    weight, sizes = getattr(module, "weight", None), (getattr(module, "out_features", None), getattr(module, "in_features", None))
    return isinstance(weight, Tensor) and tuple(weight.shape) == sizes


def _is_expert_class(cls: type) -> bool:
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", cls.__name__)
    return any(word in ("Expert", "Experts") for word in words)


def _output_heads(model: nn.Module) -> set[int]:
    for module in model.modules():
        named = getattr(module, "get_output_embeddings", None)
        head = named() if callable(named) else None
        if isinstance(head, nn.Module):
            return {id(p) for p in head.parameters()}
    linears = [(name, module) for name, module in model.named_modules() if is_linear(module)]
    vocabulary = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=None)
    heads = [m for name, m in linears if m.weight.shape[0] == vocabulary and not _in_repeated_block(model, name)]
    if not heads and linears and not _in_repeated_block(model, linears[-1][0]):
        heads = [linears[-1][1]]
    return {id(p) for head in heads for p in head.parameters()}


def _in_repeated_block(model: nn.Module, name: str) -> bool:
    """True when a module on the way down to `name` (itself excluded) has a sibling of its own class in a numbered container."""
    path = name.split(".")
    for depth in range(1, len(path)):
        if path[depth - 1].isdigit():
            block, container = model.get_submodule(".".join(path[:depth])), model.get_submodule(".".join(path[: depth - 1]))
            siblings = [child for key, child in container.named_children() if key.isdigit() and child is not block]
            if any(type(child) is type(block) for child in siblings):
                return True
    return False


def param_groups(model: nn.Module, *, rotate: Mapping[str, Sequence[str]] | None = None, holds_output: bool = True) -> list[dict]:
    """Parameter groups for a plain PyTorch loop: `BasisRotation(param_groups(model), lr=...)`.

    Args:
        model: the model.
        rotate: {"include": [...], "exclude": [...]}, patterns as in `route`.
        holds_output: False for a part of a model that ends before the output, such as a pipeline stage that is not the last.

    Returns:
        At most two groups of named parameters, the rotated ones and the rest, each with its `rotate` flag.

    Raises:
        ValueError: illegal patterns, a pattern that matches nothing, or nothing to rotate.
    """
    check_patterns(rotate)
    if holds_output:  # a pattern may be meant for another part
        check_patterns_match(rotate, [name for name, _ in model.named_parameters()])
    routes, parameters = route(model, rotate, holds_output=holds_output), dict(model.named_parameters())
    groups = [
        {"params": [(name, parameters[name]) for name in routes if routes[name].rotate is flag], "rotate": flag} for flag in (True, False)
    ]
    if not groups[0]["params"]:
        raise ValueError(f"nothing would be rotated: {describe(routes)}; name matrices with rotate.include, or use AdamW")
    return [group for group in groups if group["params"]]


def named_rotation(
    parameters: Sequence[Tensor], names: Sequence[str] | None, rotate: bool | Sequence[bool] | None, patterns: Mapping[str, Sequence[str]]
) -> tuple[bool, ...]:
    """Rotation flags of a parameter group: its `rotate` (None: every parameter with two dimensions), then the patterns on names.

    Raises:
        ValueError: flags that do not fit, patterns without names, or a flagged parameter that is not a matrix.
    """
    if rotate is None:
        flags = [p.ndim == 2 for p in parameters]
    elif isinstance(rotate, bool):
        flags = [rotate] * len(parameters)
    elif isinstance(rotate, (list, tuple)) and len(rotate) == len(parameters) and all(isinstance(flag, bool) for flag in rotate):
        flags = list(rotate)
    else:
        raise ValueError(f"rotate of a parameter group: must be true, false or a list of {len(parameters)} of them, got {rotate!r}")
    if patterns:
        if names is None:
            raise ValueError(
                "rotate: include and exclude patterns need names: pass model.named_parameters() or ds_basisrot.param_groups(model)"
            )
        routes = [_by_pattern(name, p, patterns) for name, p in zip(names, parameters)]
        flags = [flag if pattern is None else pattern.rotate for flag, pattern in zip(flags, routes)]
    for index, (p, flag) in enumerate(zip(parameters, flags)):
        if flag and p.ndim not in (2, 3):
            name = names[index] if names is not None else f"parameter {index}"
            raise ValueError(f"rotate: {name} has shape {list(p.shape)} and cannot be rotated: only [m, n] and stacked [e, m, n] can")
    return tuple(flags)


def describe(routes: Mapping[str, Route]) -> str:
    """One line with how many parameters are rotated and how many are not, by reason."""

    def count(flag: bool) -> str:
        reasons = Counter(r.reason for r in routes.values() if r.rotate is flag)
        listed = ", ".join(f"{number} {reason}" for reason, number in reasons.items())
        return f"{sum(reasons.values())}" + (f" ({listed})" if listed else "")

    return f"rotated: {count(True)}; AdamW: {count(False)}"
