"""The state of one parameter: its keys, shapes and units, and which gradients fit it."""

import math
from typing import Any

import torch
from torch import Tensor

# State of a parameter. The moments of a rotated matrix are in the rotated basis, whence their other names.
STEP, SCALE, FAILED_REFRESHES = "step", "gradient_scale", "failed_refreshes"
MOMENTUM, SECOND_MOMENT = "exp_avg", "exp_avg_sq"
ROTATED_MOMENTUM, ROTATED_SECOND_MOMENT = "rotated_exp_avg", "rotated_exp_avg_sq"
LEFT_BASIS, RIGHT_BASIS = "left_basis", "right_basis"
LEFT_COVARIANCE, RIGHT_COVARIANCE = "left_covariance", "right_covariance"
SIDES = ((LEFT_BASIS, LEFT_COVARIANCE), (RIGHT_BASIS, RIGHT_COVARIANCE))

# State in units of the gradient's scale, and in which power of it.
SCALED = {MOMENTUM: 1, ROTATED_MOMENTUM: 1, SECOND_MOMENT: 2, ROTATED_SECOND_MOMENT: 2, LEFT_COVARIANCE: 2, RIGHT_COVARIANCE: 2}

# Gradients whose largest element lies between these need no scaling: their squares and sums of squares are ordinary float32 numbers.
SMALLEST_UNSCALED, LARGEST_UNSCALED, SMALLEST_SCALE = 2.0**-40, 2.0**40, 2.0**-120

# In units of the scale: the square of a smaller element is zero in float32, and its step would be unbounded.
SMALLEST_EPS = 2.0**-63


def new_state(p: Tensor, sides: tuple[bool, bool], second_order: bool, size: float, meta: bool = False) -> dict[str, Any]:
    """Empty state of a parameter with these rotated sides (left, right).

    Args:
        second_order: whether there are covariances.
        size: largest element of the parameter's first gradient, which decides the unit.
        meta: shapes alone, without storage.
    """
    device = "meta" if meta else p.device
    state: dict[str, Any] = {STEP: 0, SCALE: 1.0 if SMALLEST_UNSCALED <= size <= LARGEST_UNSCALED else _power_of_two(size)}
    moments = (ROTATED_MOMENTUM, ROTATED_SECOND_MOMENT) if any(sides) else (MOMENTUM, SECOND_MOMENT)
    for key in moments:
        state[key] = torch.zeros(p.shape, dtype=torch.float32, device=device)
    if not any(sides):
        return state
    state[FAILED_REFRESHES] = 0
    for rotated, side, (basis, covariance) in zip(sides, p.shape[-2:], SIDES):
        if rotated:
            shape = (*p.shape[:-2], side, side)
            state[basis] = torch.eye(side, device=device).expand(shape).clone()
            if second_order:
                state[covariance] = torch.zeros(shape, device=device)
    return state


def _power_of_two(size: float) -> float:
    return max(SMALLEST_SCALE, 2.0 ** math.floor(math.log2(size)))


def is_usable(state: dict | None, size: float) -> bool:
    """False for a gradient that is not finite, or that is absurdly larger than those its state is made of."""
    return math.isfinite(size) and (not state or size <= LARGEST_UNSCALED * max(1.0, state[SCALE]))


def is_history(state: dict, size: float) -> bool:
    """True when a state is made of gradients so huge that the present ones would vanish beside them: it is begun anew."""
    return state[SCALE] > 1.0 and 0.0 < size < SMALLEST_UNSCALED * state[SCALE]


def rescale(state: dict, size: float) -> None:
    """A state made of tiny gradients is in units of a small power of two; take a larger one, exactly, once gradients have outgrown it."""
    if size <= LARGEST_UNSCALED * state[SCALE]:
        return
    scale = min(1.0, _power_of_two(size))
    ratio = state[SCALE] / scale
    for key, power in SCALED.items():
        if key in state:
            state[key].mul_(ratio**power)
    state[SCALE] = scale


def check_state(saved: dict, expected: dict, name: str) -> None:
    """Refuse a saved state that does not have the expected keys and shapes."""
    if set(saved) != set(expected):
        differing = ", ".join(sorted(set(saved) ^ set(expected)))
        raise ValueError(
            f"the saved state of {name} is of another kind (differing: {differing}): "
            "resume with the optimizer, geometry, source, max_dim and rotate it was saved with"
        )
    for key, value in expected.items():
        if torch.is_tensor(value) and saved[key].shape != value.shape:
            raise ValueError(
                f"the saved {key} of {name} has shape {list(saved[key].shape)}, expected {list(value.shape)}: it is of another model"
            )
