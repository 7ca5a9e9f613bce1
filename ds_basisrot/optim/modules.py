"""Which parameters are rotated, and as which matrices, by what the module that owns them is: a linear map, a convolution, experts, ..."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from .fused import Fused, fused_gate_up, fused_qkv, stacked_gate_up, words
from .layout import parts

Entry = bool | dict[str, Any]  # what a parameter group's `rotate` says of one parameter, see `layout.parts`


@dataclass(frozen=True)
class Route:
    """Where one parameter goes: rotated or plain AdamW, why, and as which matrices."""

    rotate: bool
    reason: str
    layout: Entry = True
    """Of a parameter that is rotated: True, or the layout that `layout.parts` takes."""

    @property
    def entry(self) -> Entry:
        """What stands in a parameter group's `rotate`."""
        return self.rotate and self.layout


LINEAR = Route(True, "linear weight")
ATTENTION = Route(True, "attention input projection")
EXPERTS = Route(True, "stacked expert weights")
CONVOLUTION = Route(True, "convolution")
LORA = Route(True, "LoRA matrix")
EMBEDDING = Route(False, "embedding")
OUTPUT_HEAD = Route(False, "output head")
NORM_OR_BIAS = Route(False, "norm or bias")
VECTOR = Route(False, "vector")
EMPTY = Route(False, "empty")
OTHER = Route(False, "not the weight of a linear map")

# Modules that stand between a layer and the module it belongs to: adapters, compilation, checkpointing, sharding.
WRAPPERS = {"base_layer", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


# What linear maps call the sizes of their weight; the last two are tensor-parallel ones of Megatron, which hold rows or columns of it.
LINEAR_SIZES = (
    ("out_features", "in_features"),
    ("output_size_per_partition", "input_size"),
    ("output_size", "input_size_per_partition"),
)


def routes_by_module(model: nn.Module, holds_output: bool) -> dict[str, Route]:
    """The route that its module gives each trainable parameter, by its first name (see `routing.route` for the rules)."""
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters(recurse=False)}
    heads = _output_heads(model) if holds_output else set()
    modules = dict(model.named_modules())
    routes = {}
    for full_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        prefix, _, name = full_name.rpartition(".")
        if parameter.numel() == 0:
            routes[full_name] = EMPTY
        elif id(parameter) in embeddings:
            routes[full_name] = EMBEDDING
        elif id(parameter) in heads:
            routes[full_name] = OUTPUT_HEAD
        elif parameter.ndim < 2:
            routes[full_name] = NORM_OR_BIAS
        else:
            found = _matrices_of(name, parameter, modules[prefix], *_owner(prefix, modules))
            routes[full_name] = VECTOR if found.rotate and is_vector(parameter, found.layout) else found
    return routes


def is_vector(parameter: Tensor, layout: Entry) -> bool:
    """True when the matrices of a parameter have a single row or column: rotating them gains nothing."""
    return all(1 in part.shape[1:] for part in parts(parameter.shape, layout))


def is_linear(module: nn.Module) -> bool:
    """True for a module that multiplies by a weight `[out, in]`, or by its share of one, whatever class it has (see LINEAR_SIZES)."""
    if isinstance(module, nn.Linear):
        return True
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and any(
        tuple(weight.shape) == (getattr(module, rows, None), getattr(module, columns, None)) for rows, columns in LINEAR_SIZES
    )


def _is_transposed_linear(module: nn.Module) -> bool:
    """True for Hugging Face's `Conv1D`, a linear map with a weight `[in, out]`."""
    weight, outputs = getattr(module, "weight", None), getattr(module, "nf", None)
    is_named = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    return is_named and isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[1] == outputs


def _owner(prefix: str, modules: Mapping[str, nn.Module]) -> tuple[str, nn.Module | None]:
    """What the module at `prefix` is called, and by which module, wrappers aside."""
    path = prefix.split(".")
    while len(path) > 1 and path[-1] in WRAPPERS:
        path.pop()
    return path[-1], modules.get(".".join(path[:-1])) if prefix else None


def _matrices_of(name: str, parameter: Tensor, module: nn.Module, module_name: str, owner: nn.Module | None) -> Route:
    """The route of a parameter called `name` in a module that `owner` calls `module_name`."""
    if is_linear(module) and parameter is module.weight:
        return _linear(module_name, *parameter.shape, owner)
    if _is_transposed_linear(module) and parameter is module.weight:
        found = _linear(module_name, *reversed(parameter.shape), owner)
        return replace(found, layout={**({} if found.layout is True else found.layout), "transposed": True})
    if isinstance(module, nn.MultiheadAttention) and parameter.ndim == 2:
        return (parameter is module.in_proj_weight and _fused(fused_qkv("qkv", *parameter.shape, module))) or ATTENTION
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and parameter is module.weight:
        return replace(CONVOLUTION, layout={"kind": "convolution"}) if parameter.ndim == 3 else CONVOLUTION
    if name in ("lora_A", "lora_B") and parameter.ndim == 2 and (is_linear(module) or _is_transposed_linear(module)):
        return LORA
    if parameter.ndim == 3 and not {"Expert", "Experts"}.isdisjoint(words(type(module))):
        return _stacked(name, parameter, module, module_name, owner)
    return OTHER


def _linear(name: str, rows: int, columns: int, owner: nn.Module | None) -> Route:
    """A linear map `[rows, columns]` that its owner calls `name`."""
    neighbours = [weight.shape[0 if _is_transposed_linear(child) else 1] for child, weight in _weights(owner, 2)]
    return _fused(fused_qkv(name, rows, columns, owner)) or _fused(fused_gate_up(name, rows, neighbours, owner)) or LINEAR


def _stacked(name: str, parameter: Tensor, module: nn.Module, module_name: str, owner: nn.Module | None) -> Route:
    """A stacked weight of an expert module: one that has all of them, or one that is a single linear map for all experts."""
    if name == "weight":
        name, stacks = module_name, [weight for _, weight in _weights(owner, 3)]
    else:
        stacks = [p for p in module.parameters(recurse=False) if p.ndim == 3]
    others = [stack.shape for stack in stacks if stack is not parameter]
    return _fused(stacked_gate_up(name, parameter.shape, others, module)) or EXPERTS


def _weights(owner: nn.Module | None, dimensions: int) -> list[tuple[nn.Module, Tensor]]:
    """The modules directly in `owner` that have a weight with so many dimensions, and their weights."""
    children = owner.children() if owner is not None else ()
    found = [(child, getattr(child, "weight", None)) for child in children]
    return [(child, weight) for child, weight in found if isinstance(weight, Tensor) and weight.ndim == dimensions]


def _fused(found: Fused | None) -> Route | None:
    return found and Route(True, found[0], found[1] or True)


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
