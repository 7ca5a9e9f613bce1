"""The states of a sharded optimizer by name, for checkpoints, and as Adam's flat states, for tools that know those only."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..optim.adam_state import from_adam, to_adam
from ..optim.basis_rotation import RESTORED_OPTIONS
from ..optim.loading import loaded_state
from ..optim.state import MOMENTUM, SCALE, SECOND_MOMENT, STEP
from .buffers import Buffer, Member
from .optimizer import ShardedBasisRotation


def named_states(optimizer: ShardedBasisRotation) -> dict[str, dict[str, Any]]:
    """States of the rotated matrices that this rank owns, by name; the tensors are the optimizer's own."""
    return {
        buffer.label(member.parameter) + member.name: state
        for buffer in optimizer.buffers
        for member in buffer.members
        if member.role.stacks and (state := optimizer.own_states.get(member.p))
    }


def layouts(optimizer: ShardedBasisRotation) -> dict[str, Any]:
    """Each rotated parameter's entry in `rotate`, by name."""
    return {
        name: entry for group in optimizer.blueprint.param_groups for name, entry in zip(group["param_names"], group["rotate"]) if entry
    }


def options(optimizer: ShardedBasisRotation) -> dict[str, dict[str, Any]]:
    """What a checkpoint restores in each group, by the group's first parameter."""
    groups = zip(optimizer.blueprint.param_groups, optimizer.param_groups)
    return {own["param_names"][0]: {key: _plain(group[key]) for key in RESTORED_OPTIONS if key in group} for own, group in groups}


def restore_options(optimizer: ShardedBasisRotation, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Take up `options`, as DeepSpeed's universal checkpoints of ZeRO 3 give every group those of the first one."""
    for own, group in zip(optimizer.blueprint.param_groups, optimizer.param_groups):
        its = saved.get(own["param_names"][0], {})
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in its.items()})


def _plain(value: Any) -> Any:
    return value.item() if torch.is_tensor(value) else value


def flat_bookkeeping(optimizer: ShardedBasisRotation) -> dict[str, dict[str, Any]]:
    """Updates made and unit of the parameters that are not rotated and of which this rank holds a slice, by name."""
    return {
        buffer.label(member.parameter) + member.name: {STEP: state[STEP], SCALE: state[SCALE]}
        for buffer in optimizer.buffers
        for member in buffer.members
        if not member.role.stacks and (state := optimizer.own_states.get(member.p))
    }


@torch.no_grad()
def add_flat_states(optimizer: ShardedBasisRotation) -> None:
    """Give every buffer Adam's `exp_avg`, `exp_avg_sq` and `step`, as if Adam had trained it. Every rank calls it."""
    optimizer.settle()
    for buffer in optimizer.buffers:
        weights = buffer.flat.buffer.data
        flat = {STEP: 0, MOMENTUM: torch.zeros_like(weights), SECOND_MOMENT: torch.zeros_like(weights)}
        wholes: dict[str, tuple[Tensor, Tensor]] = {}
        for member in buffer.members:
            state = optimizer.own_states.get(member.p)
            if state:
                flat[STEP] = max(flat[STEP], state[STEP])
                moments = to_adam(state, member.role.stacks, member.shape)
                if member.moves:
                    wholes[member.name] = moments
                else:
                    for key, moment in zip((MOMENTUM, SECOND_MOMENT), moments):
                        member.piece.of(flat[key]).copy_(moment.flatten())
        for message in buffer.messages:
            for place, key in enumerate((MOMENTUM, SECOND_MOMENT)):
                zeros = {member.name: weights.new_zeros(member.numel) for member in message.owned if member.name not in wholes}
                own = {member.name: wholes[member.name][place].flatten() for member in message.owned if member.name in wholes}
                slices = message.exchange.scatter({**zeros, **own}).wait()
                for unit, _, piece in message.held:
                    piece.of(flat[key]).copy_(slices[unit.name])
        flat[STEP] = buffer.largest(flat[STEP])  # a rank that holds slices alone has no state that counts
        optimizer.state[buffer.flat.buffer] = flat


def drop_flat_states(optimizer: ShardedBasisRotation) -> None:
    """Undo `add_flat_states`."""
    optimizer.state.clear()


@torch.no_grad()
def restore(
    optimizer: ShardedBasisRotation,
    find: Callable[[str], Mapping[str, Any] | None],
    started: set[str],
    bookkeeping: Mapping[str, Mapping[str, Any]],
    saved_layouts: Mapping[str, Any],
) -> None:
    """Take up the states of rotated matrices by name, and the others from the flat states that a wrapper has loaded.

    Args:
        find: a saved state, or None where there was none; called for what this rank owns.
        started: names of all rotated matrices that have a state.
        bookkeeping: `flat_bookkeeping` of all ranks.
        saved_layouts: `layouts` when it was saved.

    Raises:
        ValueError: the state is of another model, routing, layout, geometry or source.
    """
    states: dict[Tensor, dict[str, Any]] = {}
    rotated = {name.partition("[")[0] for name in started}
    for buffer in optimizer.buffers:
        flat = optimizer.state.get(buffer.flat.buffer)
        buffer.started = [name in started or name in bookkeeping for name in buffer.names]
        for member in buffer.members:
            label = buffer.label(member.parameter)
            name, parameter = label + member.name, label + member.parameter
            otherwise = started & {parameter} if name != parameter else {each for each in (f"{name}[0]",) if each in started}
            if parameter in (bookkeeping if member.role.stacks else rotated) or otherwise:
                raise ValueError(
                    f"the saved state of {member.role.name} is of another kind: rotated then and not now, not then and now, or as other "
                    "matrices; resume with the rotate and max_dim it was saved with, or remove the folder of the rotation states to start "
                    "with fresh bases"
                )
            if member.role.stacks:
                saved = find(name)
                if saved:
                    layout = saved_layouts.get(member.parameter)
                    states[member.p] = loaded_state(
                        _stand_in(member, buffer), member.role, optimizer.options_of(member.parameter), saved, layout
                    )
            elif name in bookkeeping and flat:
                momentum, second_moment = (member.piece.of(flat[key]) for key in (MOMENTUM, SECOND_MOMENT))
                scale = float(bookkeeping[name][SCALE])
                moments = {MOMENTUM: momentum / scale, SECOND_MOMENT: second_moment / scale / scale}
                states[member.p] = {STEP: int(bookkeeping[name][STEP]), SCALE: scale, **moments}
    _replace(optimizer, states)


@torch.no_grad()
def restore_from_adam(optimizer: ShardedBasisRotation, updates: int) -> bool:
    """Begin with the flat states that a wrapper has loaded, which are Adam's: momenta are kept, bases are fresh. Every rank calls it.

    Args:
        updates: made so far, for Adams that do not say.

    Returns:
        False where there were none.
    """
    states: dict[Tensor, dict[str, Any]] = {}
    found = False
    for buffer in optimizer.buffers:
        flat = optimizer.state.get(buffer.flat.buffer)
        if not flat:
            continue
        found, step = True, int(flat.get(STEP, updates))
        buffer.started = [step > 0] * buffer.count
        wholes: dict[str, list[Tensor]] = {}
        for message in buffer.messages:
            for key in (MOMENTUM, SECOND_MOMENT):
                gathered = message.exchange.gather({unit.name: piece.of(flat[key]) for unit, _, piece in message.held}).wait()
                for name, whole in gathered.items():
                    wholes.setdefault(name, []).append(whole)
        for member in buffer.members:
            moments = wholes[member.name] if member.moves else [member.piece.of(flat[key]).clone() for key in (MOMENTUM, SECOND_MOMENT)]
            group, p = optimizer.options_of(member.parameter), _stand_in(member, buffer)
            if step > 0:
                states[member.p] = from_adam(p, member.role.stacks, group, step, *(moment.view(member.shape) for moment in moments))
    _replace(optimizer, states)
    return found


def _replace(optimizer: ShardedBasisRotation, states: dict[Tensor, dict[str, Any]]) -> None:
    optimizer.settle()
    optimizer.own_states.clear()
    optimizer.own_states.update(states)
    drop_flat_states(optimizer)


def _stand_in(member: Member, buffer: Buffer) -> Tensor:
    """A tensor with the member's shape and device that takes no memory."""
    return torch.empty(1, device=buffer.flat.buffer.device).expand(member.shape)
