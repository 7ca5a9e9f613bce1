"""States of BasisRotation inside Megatron's optimizers by name, for checkpoints: of what a rank owns, or holds a slice of."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from ds_basisrot.optim.loading import loaded_state
from ds_basisrot.sharding.buffers import Buffer, Member
from ds_basisrot.sharding.optimizer import ShardedBasisRotation

from .optimizer import rotations


def named_states(built: MegatronOptimizer) -> dict[str, dict[str, Any]]:
    """States of the matrices that this rank owns, and of its slices of what is not rotated.

    Returns:
        By name in the whole model, the keys of `ds_basisrot.optim.state` with tensors, which are the optimizer's own, and numbers. A matrix
        of a stack has its index in brackets, a slice its elements of this rank's part of the parameter, such as "bias[16:32]". Where
        tensor-parallel ranks hold different parts, the name begins with the rank. What they hold copies of, all of them return.
    """
    found = {}
    for rotation in rotations(built):
        rotation.settle()
        found |= {name: state for name, member, _ in _members(rotation) if (state := rotation.own_states.get(member.p))}
    return found


@torch.no_grad()
def restore_named_states(built: MegatronOptimizer, get: Callable[[str], Mapping[str, Any] | None]) -> None:
    """Take up saved states in the place of all present ones. Every rank calls it.

    Args:
        get: the saved state of a name as `named_states` has it, None where there was none; called for what this rank owns or holds.

    Raises:
        ValueError: a state is of another model, routing, layout, geometry or source.
    """
    for rotation in rotations(built):
        states: dict[Tensor, dict[str, Any]] = {}
        for name, member, buffer in _members(rotation):
            saved = get(name)
            if saved:
                stand_in = torch.empty(1, device=buffer.flat.buffer.device).expand(member.shape)
                states[member.p] = loaded_state(stand_in, member.role, rotation.options_of(member.parameter), saved)
        rotation.settle()
        rotation.own_states.clear()
        rotation.own_states.update(states)
        for buffer in rotation.buffers:
            _note_started(buffer, {member.index for member in buffer.members if member.p in states})


def _members(rotation: ShardedBasisRotation) -> Iterator[tuple[str, Member, Buffer]]:
    """What this rank has states of, by name."""
    for buffer in rotation.buffers:
        for member in buffer.members:
            name = buffer.label(member.parameter) + member.name
            if not member.role.stacks:
                name += f"[{member.piece.offset}:{member.piece.offset + member.piece.numel}]"
            yield name, member, buffer


def _note_started(buffer: Buffer, started: set[int]) -> None:
    """What has a state on any rank of the group decays on all that hold a slice of it."""
    flags = torch.tensor([index in started for index in range(buffer.count)], dtype=torch.uint8, device=buffer.flat.buffer.device)
    if buffer.ranks > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=buffer.flat.group)
    buffer.started = flags.bool().tolist()
