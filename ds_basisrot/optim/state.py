"""The state of one parameter: its keys, shapes and units, and which gradients fit it."""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import Part, parts
from .symmetric import packed_size

# State of a parameter. The moments of rotated matrices are in the rotated basis, whence their other names. Where a parameter consists of
# several parts, the keys of its matrices begin with the part's name and a dot.
BOOKKEEPING = STEP, SCALE, FAILED_REFRESHES, COLD = "step", "gradient_scale", "failed_refreshes", "cold"
MOMENTUM, SECOND_MOMENT = "exp_avg", "exp_avg_sq"
ROTATED_MOMENTUM, ROTATED_SECOND_MOMENT = "rotated_exp_avg", "rotated_exp_avg_sq"
LEFT_BASIS, RIGHT_BASIS = "left_basis", "right_basis"
LEFT_COVARIANCE, RIGHT_COVARIANCE = "left_covariance", "right_covariance"

# State in units of the gradient's scale, and in which power of it.
SCALED = {MOMENTUM: 1, ROTATED_MOMENTUM: 1, SECOND_MOMENT: 2, ROTATED_SECOND_MOMENT: 2, LEFT_COVARIANCE: 2, RIGHT_COVARIANCE: 2}

# Gradients whose largest element lies between these need no scaling: their squares and sums of squares are ordinary float32 numbers.
SMALLEST_UNSCALED, LARGEST_UNSCALED, SMALLEST_SCALE = 2.0**-40, 2.0**40, 2.0**-120

# In units of the scale: what a state may take in. Sums of squares over a hundred million such elements are float32 numbers still.
LARGEST_USABLE = 2.0**50

# In units of the scale: the square of a smaller element is zero in float32, and its step would be unbounded.
SMALLEST_EPS = 2.0**-63

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Of momentum and bases. The second moment and the covariances decay so slowly that bfloat16 would round their increments away."""


class Rotation(NamedTuple):
    """One rotated side of the matrices of a stack."""

    length: int
    left: bool
    basis: str
    """The state's key for it."""
    covariance: str
    """The state's key for it."""


@dataclass
class MatrixStack:
    """Equally shaped matrices inside a parameter, which are rotated alike.

    Attributes:
        part: where they are in the parameter.
        sides: rotated sides (left, right).
        offsets: place of each matrix in the refresh period, in updates.
    """

    part: Part
    sides: tuple[bool, bool]
    offsets: list[int] = field(default_factory=list)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """`[m, n]` of a single matrix, `[b, m, n]` of several."""
        b, m, n = self.part.shape
        return (m, n) if b == 1 else (b, m, n)

    @cached_property
    def momentum(self) -> str:
        """The state's key for it."""
        return self.key(ROTATED_MOMENTUM)

    @cached_property
    def second_moment(self) -> str:
        """The state's key for it."""
        return self.key(ROTATED_SECOND_MOMENT)

    @cached_property
    def cold(self) -> str:
        """The state's key for the list of matrices that have no basis yet."""
        return self.key(COLD)

    def key(self, name: str) -> str:
        """The state's key for `name`."""
        return f"{self.part.name}.{name}" if self.part.name else name

    def name_of(self, index: int) -> str:
        """What to print after the parameter's name for one of the matrices."""
        part = f", {self.part.name}" if self.part.name else ""
        return part + (f", matrix {index}" if self.part.shape[0] > 1 else "")

    def bases(self, state: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Tensor | None, Tensor | None]:
        """(U, V) in this precision, None for a side that is not rotated."""
        left, right = self._bases
        return None if left is None else state[left].to(dtype), None if right is None else state[right].to(dtype)

    @cached_property
    def _bases(self) -> tuple[str | None, str | None]:
        return tuple(self.key(name) if on else None for name, on in zip((LEFT_BASIS, RIGHT_BASIS), self.sides))

    @cached_property
    def rotations(self) -> list[Rotation]:
        """Of each rotated side, the left one first."""
        _, m, n = self.part.shape
        left = Rotation(m, True, self.key(LEFT_BASIS), self.key(LEFT_COVARIANCE))
        right = Rotation(n, False, self.key(RIGHT_BASIS), self.key(RIGHT_COVARIANCE))
        return [rotation for rotation, on in zip((left, right), self.sides) if on]


def new_state(p: Tensor, stacks: Sequence[MatrixStack], group: dict[str, Any], size: float, meta: bool = False) -> dict[str, Any]:
    """Empty state of a parameter that consists of `stacks` (none: it is not rotated).

    Args:
        group: its `source` and `state_dtype` decide what is stored, and how.
        size: largest element of the parameter's first gradient, which decides the unit.
        meta: shapes alone, without storage.
    """
    device = "meta" if meta else p.device
    state: dict[str, Any] = {STEP: 0, SCALE: 1.0 if SMALLEST_UNSCALED <= size <= LARGEST_UNSCALED else _power_of_two(size)}
    if not stacks:
        for key in (MOMENTUM, SECOND_MOMENT):
            state[key] = torch.zeros(p.shape, dtype=torch.float32, device=device)
        return state
    dtype = STATE_DTYPES[group["state_dtype"]]
    for stack in stacks:
        lead = stack.shape[:-2]
        state[stack.momentum] = torch.zeros(stack.shape, dtype=dtype, device=device)
        state[stack.second_moment] = torch.zeros(stack.shape, device=device)
        state[stack.key(FAILED_REFRESHES)] = [0] * stack.part.shape[0]
        state[stack.cold] = list(range(stack.part.shape[0])) if any(stack.sides) else []
        for side, _, basis, covariance in stack.rotations:
            state[basis] = torch.eye(side, dtype=dtype, device=device).expand(*lead, side, side).clone()
            if group["source"] == "second_order":
                state[covariance] = torch.zeros(*lead, packed_size(side), device=device)
    return state


def _power_of_two(size: float) -> float:
    return max(SMALLEST_SCALE, 2.0 ** math.floor(math.log2(size)))


def is_usable(state: dict | None, size: float) -> bool:
    """False for a gradient that is not finite, or that is absurdly larger than those its state is made of."""
    return math.isfinite(size) and (not state or size <= LARGEST_USABLE * max(1.0, state[SCALE]))


def fits(state: dict | None, size: float) -> bool:
    """True in the ordinary case: the gradient is usable, and the state is neither begun anew nor rescaled for it."""
    if not state:
        return False
    scale = state[SCALE]
    return size <= LARGEST_UNSCALED * scale and (scale <= 1.0 or size >= SMALLEST_UNSCALED * scale)


def is_history(state: dict, size: float) -> bool:
    """True when a state is made of gradients so huge that the present ones would vanish beside them: it is begun anew."""
    return state[SCALE] > 1.0 and 0.0 < size < SMALLEST_UNSCALED * state[SCALE]


def rescale(state: dict, size: float) -> None:
    """A state made of tiny gradients is in units of a small power of two; take a larger one, exactly, once gradients have outgrown it."""
    if size <= LARGEST_UNSCALED * state[SCALE]:
        return
    scale = min(1.0, _power_of_two(size))
    ratio = state[SCALE] / scale
    for key, value in state.items():
        power = SCALED.get(key.rpartition(".")[2])
        if power:
            value.mul_(ratio**power)
    state[SCALE] = scale


def complete_state(saved: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """A saved state with the bookkeeping that it may lack, and with plain numbers where another program made tensors of them."""
    numbers = [key for key, value in saved.items() if key.rpartition(".")[2] in BOOKKEEPING and torch.is_tensor(value)]
    saved = saved | {key: saved[key].tolist() for key in numbers}
    for key, value in expected.items():
        kind = key.rpartition(".")[2]
        if kind in (SCALE, FAILED_REFRESHES):
            saved.setdefault(key, copy(value))
        elif kind == COLD:
            saved.setdefault(key, [])
    return saved | {STEP: int(saved[STEP])} if STEP in saved else saved


def check_layout_of_state(p: Tensor, layout: Any, stacks: Sequence[MatrixStack], name: str) -> None:
    """Refuse the state of a parameter that was rotated as other matrices; `layout` is its entry in the saved `rotate` (None: not saved)."""
    if layout is None or not stacks:
        return
    try:
        is_same = parts(p.shape, layout) == tuple(stack.part for stack in stacks)
    except ValueError:  # the layout is of another shape
        is_same = False
    if not is_same:
        raise ValueError(
            f"the saved state of {name} is of other matrices: it was rotated with the layout {layout}; resume with that one, or without "
            "optimizer state"
        )


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
