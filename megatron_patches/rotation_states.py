"""BasisRotation's states in a torch_dist checkpoint: every matrix by its name, all else in the slices that ranks held.

Any number of data-parallel ranks finds its own in it: who owns which matrix, and where slices begin, may differ from what it was.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch import Tensor

from ds_basisrot.common.log import log
from ds_basisrot.optim.adam_state import to_adam
from ds_basisrot.optim.state import MOMENTUM, SCALE, SECOND_MOMENT, STEP
from ds_basisrot.sharding import states
from ds_basisrot.sharding.buffers import Buffer, Member
from ds_basisrot.sharding.optimizer import ShardedBasisRotation

MATRIX, SLICE = "ds_basisrot.matrix", "ds_basisrot.slice"
FACTS, LAYOUT = "facts", "layout"
SEPARATOR = "|"

Rotations = Sequence[ShardedBasisRotation]


class Saved(NamedTuple):
    """A slice of what is not rotated, as a checkpoint has it.

    Attributes:
        prefix: of its keys.
        offset, numel: in the flattened parameter.
    """

    prefix: str
    offset: int
    numel: int


def sharded(rotations: Rotations) -> dict[str, Any]:
    """What this rank adds to a checkpoint, by key."""
    found: dict[str, Any] = {}
    for rotation in rotations:
        rotation.settle()
        layouts = states.layouts(rotation)
        for buffer, member, name in _members(rotation):
            state = rotation.own_states.get(member.p)
            if not state:
                continue
            replica = _replica(buffer, member)
            if member.role.stacks:
                tensors = {key: value for key, value in state.items() if torch.is_tensor(value) and value.ndim > 0}
                facts = {key: value for key, value in state.items() if key not in tensors}
                found.update(_entries(_key(MATRIX, name), tensors, {**facts, LAYOUT: layouts.get(member.parameter)}, replica))
            else:
                moments = dict(zip((MOMENTUM, SECOND_MOMENT), to_adam(state, (), member.shape)))
                prefix = _key(SLICE, name, member.piece.offset, member.piece.numel)
                found.update(_entries(prefix, moments, {STEP: state[STEP], SCALE: state[SCALE]}, replica))
    return found


def wanted(rotations: Rotations, present: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank asks a checkpoint for, by key. Every rank of the world calls it.

    Args:
        present: everything in the checkpoint, from `load_sharded_metadata`.
    """
    keys_of, slices = _index(present)
    keys: dict[str, None] = {}
    for rotation in rotations:
        for _, member, name in _members(rotation):
            if member.role.stacks:
                prefixes = [_key(MATRIX, name)]
            else:
                prefixes = [saved.prefix for saved in _overlapping(member, slices.get(name, ()))]
            for prefix in prefixes:
                keys.update(dict.fromkeys(keys_of.get(prefix, ())))
    # Ranks with copies of one parameter ask for the same, and so do those whose slices lie in one slice of what was saved.
    of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, list(keys))
    before = Counter(key for of_one in of_ranks[: dist.get_rank()] for key in of_one)
    return {key: _request(key, present, before[key]) for key in keys}


def is_there(present: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has such states at all."""
    return any(name.startswith((f"{MATRIX}{SEPARATOR}", f"{SLICE}{SEPARATOR}")) for name in present)


def restore(rotations: Rotations, loaded: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Take up what `wanted` asked for. Every rank calls it.

    Raises:
        ValueError: a state is of another model, routing, layout, geometry or source.
    """
    _, slices = _index(present)
    started = {parts[1] for name in present if (parts := name.split(SEPARATOR))[0] == MATRIX}
    _say_what_is_missing(rotations, loaded, slices)
    for rotation in rotations:
        layouts: dict[str, Any] = {}
        bookkeeping = {name: {STEP: 0, SCALE: 1.0} for name in slices}
        for buffer, member, name in _members(rotation):
            if member.role.stacks:
                layout = loaded.get(_key(MATRIX, name, FACTS), {}).get(LAYOUT)
                if layout is not None:
                    layouts[member.parameter] = layout
                continue
            flat = rotation.state.get(buffer.flat.buffer)
            if flat is None:
                numel = max(piece.start + piece.numel for _, piece in buffer._pieces)
                flat = {key: torch.zeros(numel, device=buffer.flat.buffer.device) for key in (MOMENTUM, SECOND_MOMENT)}
                rotation.state[buffer.flat.buffer] = flat
            for saved in _overlapping(member, slices.get(name, ())):
                bookkeeping[name] = loaded[_key(saved.prefix, FACTS)]
                begin = max(saved.offset, member.piece.offset)
                end = min(saved.offset + saved.numel, member.piece.offset + member.piece.numel)
                for key in (MOMENTUM, SECOND_MOMENT):
                    part = loaded[_key(saved.prefix, key)][begin - saved.offset : end - saved.offset]
                    member.piece.of(flat[key])[begin - member.piece.offset : end - member.piece.offset].copy_(part)
        states.restore(rotation, lambda name: _matrix(name, loaded), started, bookkeeping, layouts)


def _say_what_is_missing(rotations: Rotations, loaded: Mapping[str, Any], slices: Mapping[str, Any]) -> None:
    present = {
        name: _key(MATRIX, name, FACTS) in loaded if member.role.stacks else name in slices
        for rotation in rotations
        for _, member, name in _members(rotation)
    }
    missing = [name for name, is_present in present.items() if not is_present]
    if missing:
        log(
            f"on rank 0 the checkpoint has no state of {len(missing)} of {len(present)} parameters and matrices, the first {missing[0]}: "
            "these begin anew, as at another tensor-parallel size or tp_mode"
        )


def _matrix(name: str, loaded: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of one matrix."""
    prefix = _key(MATRIX, name)
    state = {key.rpartition(SEPARATOR)[2]: value for key, value in loaded.items() if key.rpartition(SEPARATOR)[0] == prefix}
    if not state:
        return None
    facts = state.pop(FACTS)
    return {**state, **{key: value for key, value in facts.items() if key != LAYOUT}}


def _members(rotation: ShardedBasisRotation) -> Iterator[tuple[Buffer, Member, str]]:
    """What this rank owns or holds a slice of, with names that are unique in the job."""
    for buffer in rotation.buffers:
        for member in buffer.members:
            yield buffer, member, buffer.label(member.parameter) + member.name


def _replica(buffer: Buffer, member: Member) -> int:
    """0 on the rank that saves it: of tensor-parallel ranks with the same state, the first one."""
    if buffer.label(member.parameter):
        return 0
    if ".experts." in member.parameter:
        peers = parallel_state.get_expert_tensor_parallel_group()
    else:
        peers = parallel_state.get_tensor_model_parallel_group()
    sharers = set(dist.get_process_group_ranks(buffer.flat.group))
    return 0 if sharers.issuperset(dist.get_process_group_ranks(peers)) else peers.rank()


def _entries(prefix: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], replica: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        _key(prefix, key): ShardedTensor.from_rank_offsets(_key(prefix, key), tensor, replica_id=replica) for key, tensor in tensors.items()
    }
    key = _key(prefix, FACTS)
    found[key] = ShardedObject(key, dict(facts), (1,), (0,), replica_id=replica)
    return found


def _request(key: str, present: Mapping[str, Any], replica: int) -> Any:
    if key.endswith(f"{SEPARATOR}{FACTS}"):
        return ShardedObject(key, None, (1,), (0,), replica_id=replica)
    there = present[key]
    return ShardedTensor.from_rank_offsets(key, torch.empty(there.global_shape, dtype=there.dtype), replica_id=replica)


def _index(present: Mapping[str, Any]) -> tuple[dict[str, list[str]], dict[str, list[Saved]]]:
    """(keys by their prefix, slices by the name of their parameter) of a checkpoint."""
    keys_of: dict[str, list[str]] = {}
    for unique in present:
        key = unique.partition("/")[0]
        prefix = key.rpartition(SEPARATOR)[0]
        if prefix.partition(SEPARATOR)[0] in (MATRIX, SLICE):
            keys_of.setdefault(prefix, []).append(key)
    slices: dict[str, list[Saved]] = {}
    for prefix in keys_of:
        sort, *parts = prefix.split(SEPARATOR)
        if sort == SLICE:
            name, offset, numel = parts
            slices.setdefault(name, []).append(Saved(prefix, int(offset), int(numel)))
    return keys_of, slices


def _overlapping(member: Member, slices: Sequence[Saved]) -> list[Saved]:
    first, end = member.piece.offset, member.piece.offset + member.piece.numel
    return [saved for saved in slices if saved.offset < end and first < saved.offset + saved.numel]


def _key(*parts: Any) -> str:
    return SEPARATOR.join(map(str, parts))
