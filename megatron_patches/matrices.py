"""Which parameters of a Megatron model are rotated, as which matrices, of this rank or whole over tensor parallelism, by which name."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe import experts
from torch import Tensor, nn

from ds_basisrot.common.blocks import ConfigError
from ds_basisrot.optim.fused import GATE_AND_UP, UNKNOWN_QKV, fused_gate_up, fused_qkv
from ds_basisrot.optim.modules import Entry, Route
from ds_basisrot.optim.routing import named_rotation, route

EMBEDDING_OR_OUTPUT = Route(False, "embedding or output layer")
GroupedMLP: Any = getattr(experts, "GroupedMLP", ())  # a class that 0.18 has no more
EXPERT = Route(True, "expert's linear weight")
STACKED_EXPERTS = "stacked expert weights"


class Place(NamedTuple):
    """A rank in a process group, and the size of that."""

    rank: int
    size: int


class Places(NamedTuple):
    """Where this rank is in what slices parameters."""

    tensor: Place
    expert_tensor: Place
    expert: Place


@dataclass(frozen=True)
class Matrices:
    """A trainable parameter of this rank.

    Attributes:
        name: in the whole model: layers and experts are counted from the first stage's, and the first expert-parallel rank's, first one.
        parameter: the model's own.
        shape: as the optimizer sees it, whole over `shards` tensor-parallel ranks.
        entry: what is rotated, see `ds_basisrot.optim.layout.parts`; False: nothing.
        reason: why.
        label: what sets parameters of one name apart that several ranks hold different parts of.
        shards: tensor-parallel ranks that hold the parts of what is one parameter here, each a contiguous part of it.
        is_expert: whether expert parallelism spreads it.
    """

    name: str
    parameter: Tensor
    shape: tuple[int, ...]
    entry: Entry
    reason: str
    label: str = ""
    shards: int = 1
    is_expert: bool = False

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return prod(self.shape) // self.shards

    @property
    def route(self) -> Route:
        """As `ds_basisrot.optim.routing.describe` takes it."""
        return Route(self.entry is not False, self.reason, self.entry or True)


def matrices_of(model_chunks: Sequence[nn.Module], places: Places, exact: bool, patterns: Mapping[str, Any] | None) -> list[Matrices]:
    """All trainable parameters of the model chunks of this rank, in the model's order.

    Rotated is what `ds_basisrot.optim.routing.route` says, and each expert's matrices; embeddings, the output layer and vectors are not.

    Args:
        model_chunks: as Megatron's optimizers get them, wrapped.
        places: where this rank is.
        exact: a matrix that tensor parallelism slices is one matrix of all its ranks; else each slice is one of its own.
        patterns: the JSON's `rotate`.

    Raises:
        ConfigError: patterns that do not fit, or what cannot be had exactly.
    """
    found = [each for chunk in model_chunks for each in _of_chunk(chunk, places, exact)]
    stand_ins = [nn.Parameter(torch.empty(each.shape, device="meta")) for each in found]
    if exact:
        _refuse_layouts_of_slices(found, patterns)
    try:
        entries = named_rotation(stand_ins, [each.name for each in found], [each.entry for each in found], patterns or {})
    except ValueError as error:
        raise ConfigError(f"optimizer.params.{error}") from None
    return [_settled(each, entry, places) for each, entry in zip(found, entries)]


def _of_chunk(chunk: nn.Module, places: Places, exact: bool) -> Iterator[Matrices]:
    modules, parameters = dict(chunk.named_modules()), dict(chunk.named_parameters())
    for full_name, found in route(chunk, holds_output=False).items():
        p, (path, _, own_name) = parameters[full_name], full_name.rpartition(".")
        shape: tuple[int, ...] = tuple(p.shape)
        name = _global_name(full_name, modules, places.expert.rank)
        is_expert = "experts" in full_name.split(".")
        if getattr(p, "is_embedding_or_output_parameter", False) and found.reason != "tagged":
            found = EMBEDDING_OR_OUTPUT
        elif isinstance(modules[path], GroupedMLP) and p.ndim == 2:
            shape, found = _stacked(own_name, p, modules[path])
        elif re.fullmatch(r"weight\d+", own_name) and hasattr(modules[path], "num_gemms") and p.ndim == 2:
            found = _of_grouped_linear(path, p, modules)
        each = Matrices(name, p, shape, found.entry, found.reason, is_expert=is_expert)
        yield _whole(each, path, modules, places) if exact else each


def _global_name(full_name: str, modules: Mapping[str, nn.Module], expert_rank: int) -> str:
    """The name of a chunk's parameter in the whole model, without the wrappers'."""
    path, renamed = full_name.split("."), []
    for depth, part in enumerate(path):
        module, before = modules.get(".".join(path[: depth + 1])), path[depth - 1] if depth else ""
        owner = modules.get(".".join(path[:depth]))
        if before == "layers" and part.isdigit() and "mtp" not in path and isinstance(getattr(module, "layer_number", None), int):
            part = str(module.layer_number - 1)
        elif before == "local_experts" and part.isdigit():
            part = str(int(part) + expert_rank * len(owner))
        elif hasattr(owner, "num_gemms") and (matched := re.fullmatch(r"(weight|bias)(\d+)", part)):
            part = f"{matched[1]}{int(matched[2]) + expert_rank * owner.num_gemms}"
        renamed.append(part)
    while renamed[0] == "module":
        del renamed[0]
    return ".".join(renamed)


def _stacked(name: str, p: Tensor, experts: nn.Module) -> tuple[tuple[int, int, int], Route]:
    """One of the two weights of experts that are multiplied together: transposed matrices `[in, out]`, one expert's after the other's."""
    hidden, count = experts.config.hidden_size, experts.num_local_experts
    if name == "weight2":
        return (count, p.numel() // count // hidden, hidden), Route(True, STACKED_EXPERTS, {"transposed": True})
    columns = p.numel() // count // hidden
    if not experts.config.gated_linear_unit:
        return (count, hidden, columns), Route(True, STACKED_EXPERTS, {"transposed": True})
    layout = {"transposed": True, "rows": [columns // 2] * 2, "names": list(GATE_AND_UP)}
    return (count, hidden, columns), Route(True, f"{STACKED_EXPERTS}, gate and up", layout)


def _of_grouped_linear(path: str, p: Tensor, modules: Mapping[str, nn.Module]) -> Route:
    """One expert's weight of a grouped linear map."""
    owner_path, _, name = path.rpartition(".")
    fused = fused_gate_up(name, p.shape[0], (), modules.get(owner_path))
    return Route(True, fused[0], fused[1] or True) if fused else EXPERT


def _slicing(each: Matrices, places: Places) -> tuple[int, Place]:
    """The dimension that tensor parallelism slices (-1: none), and where this rank is in that."""
    place = places.expert_tensor if each.is_expert else places.tensor
    is_sliced = place.size > 1 and getattr(each.parameter, "tensor_model_parallel", False)
    return (each.parameter.partition_dim if is_sliced else -1), place


def _whole(each: Matrices, path: str, modules: Mapping[str, nn.Module], places: Places) -> Matrices:
    """The same, as it is of all tensor-parallel ranks together: their parts one after the other."""
    dim, place = _slicing(each, places)
    if dim < 0:
        return each
    entry = each.entry
    if each.parameter.ndim != 2 or len(each.shape) != 2:
        if entry is False:
            return each
        raise ConfigError(f'optimizer.params.tp_mode: "exact" is not possible for {each.name}; use "blockwise"')
    rows, columns = each.shape
    if dim == 1:
        layout = {"kind": "columns", **(entry if isinstance(entry, dict) else {})}
        return replace(each, shape=(place.size, rows, columns), entry=entry and layout, shards=place.size)
    if isinstance(entry, dict):
        entry = {**entry, "groups": entry.get("groups", 1) * place.size}
    elif each.reason == UNKNOWN_QKV:  # groups of queries that the ranks' parts cut
        owner_path, _, name = path.rpartition(".")
        fused = fused_qkv(name, rows * place.size, columns, SimpleNamespace(config=modules[owner_path].config))
        return replace(each, shape=(place.size * rows, columns), entry=fused[1] or True, reason=fused[0], shards=place.size)
    return replace(each, shape=(place.size * rows, columns), entry=entry, shards=place.size)


def _refuse_layouts_of_slices(found: Sequence[Matrices], patterns: Mapping[str, Any] | None) -> None:
    """A layout by pattern says how the rows of a whole matrix lie, and not how the ranks' parts of it do."""
    for pattern in (patterns or {}).get("layout", {}):
        sliced = next((each.name for each in found if each.shards > 1 and fnmatchcase(each.name, pattern)), None)
        if sliced is not None:
            raise ConfigError(
                f"optimizer.params.rotate.layout: {pattern!r} matches {sliced}, which is sliced over tensor-parallel ranks; "
                'with "tp_mode": "exact" leave it out'
            )


def _settled(each: Matrices, entry: Entry, places: Places) -> Matrices:
    """With the entry that patterns leave it; what is not rotated stays a parameter of this rank alone."""
    dim, place = _slicing(each, places)
    reason = each.reason if (entry is False) == (each.entry is False) else f"{'excluded' if entry is False else 'included'} by pattern"
    if each.shards > 1 and entry is False:
        each = replace(each, shape=tuple(each.parameter.shape), shards=1)
    if each.shards > 1 and dim == 1 and entry is True:
        entry = {"kind": "columns"}
    labels = [f"tensor rank {place.rank} of {place.size}"] if dim >= 0 and each.shards == 1 else []
    if each.reason.startswith(STACKED_EXPERTS) and places.expert.size > 1:
        labels.append(f"expert rank {places.expert.rank} of {places.expert.size}")
    return replace(each, entry=entry, reason=reason, label=", ".join(labels) + ": " * bool(labels))
