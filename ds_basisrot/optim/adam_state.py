"""Adam's state of a parameter out of a rotated one, and the other way round: for tools and checkpoints that know Adam only."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .state import (
    MOMENTUM,
    SCALE,
    SECOND_MOMENT,
    STEP,
    MatrixStack,
    new_state,
)


def to_adam(state: dict[str, Any], stacks: Sequence[MatrixStack], shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(exp_avg, exp_avg_sq) of a parameter of this shape, float32, in its own basis and in the gradients' units.

    The momentum M = U M' V^T is exact. Of the second moment only the rotated coordinates' is known; were these uncorrelated, that of the
    parameter's own coordinates would be (U*U) S (V*V)^T, with elementwise squares, which this gives.
    """
    scale = state[SCALE]
    if not stacks:
        return state[MOMENTUM] * scale, state[SECOND_MOMENT] * scale * scale
    first = state[stacks[0].momentum]
    momentum, second_moment = (torch.zeros(tuple(shape), device=first.device) for _ in range(2))
    for stack in stacks:
        left, right = stack.bases(state)
        for whole, rotated, u, v in (
            (momentum, state[stack.momentum].float(), left, right),
            (second_moment, state[stack.second_moment], _squared(left), _squared(right)),
        ):
            rotated = rotated if v is None else rotated @ v.mT
            stack.part.put((rotated if u is None else u @ rotated).reshape(stack.part.shape), whole)
    return momentum * scale, second_moment * scale * scale


def from_adam(
    p: Tensor, stacks: Sequence[MatrixStack], group: dict[str, Any], step: int, momentum: Tensor, second_moment: Tensor
) -> dict[str, Any]:
    """The state of a parameter that Adam trained for `step` updates: in its own basis, until its next gradient gives the first bases.

    Args:
        p: the parameter, for its device and shape.
        group: its options.
        momentum, second_moment: Adam's, in p's shape.
    """
    state = new_state(p, stacks, group, 1.0)
    state[STEP] = step
    if not stacks:
        state[MOMENTUM].copy_(momentum)
        state[SECOND_MOMENT].copy_(second_moment)
    for stack in stacks:
        state[stack.momentum].copy_(stack.part.take(momentum).reshape(stack.shape))
        state[stack.second_moment].copy_(stack.part.take(second_moment).reshape(stack.shape))
    return state


def _squared(basis: Tensor | None) -> Tensor | None:
    return None if basis is None else basis.square()
