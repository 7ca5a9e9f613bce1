"""The matrices that move and are owned one by one, and where their elements lie: slices of flat buffers on the ranks of a group."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from torch import Tensor

from ..optim.costs import state_bytes
from ..optim.roles import Role
from .ownership import LONGEST_CYCLE, Load


class Piece(NamedTuple):
    """A contiguous slice of a parameter.

    Attributes:
        rank: in the group, which holds it.
        start: its first element in that rank's buffer.
        offset: its first element in the flattened parameter.
        numel: elements.
    """

    rank: int
    start: int
    offset: int
    numel: int

    def of(self, buffer: Tensor) -> Tensor:
        """The slice, as a view of the buffer of its rank."""
        return buffer[self.start : self.start + self.numel]

    def within(self, first: int, numel: int) -> "Piece | None":
        """The part of it that lies in the elements `first` ... `first` + `numel` - 1 of the parameter, with offsets from `first`."""
        begin, end = max(self.offset, first), min(self.offset + self.numel, first + numel)
        return Piece(self.rank, self.start + begin - self.offset, begin - first, end - begin) if begin < end else None


@dataclass
class Unit:
    """A parameter, or one of the matrices that are stacked in it, with one owner.

    Attributes:
        name: of the parameter, with the index in brackets for one of a stack.
        shape: as the optimizer sees it whole.
        role: its matrices and their refreshes.
        pieces: where its elements are; at most one on a rank.
        owner: rank in the group.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    pieces: tuple[Piece, ...]
    owner: int = 0

    @property
    def numel(self) -> int:
        """Elements of it."""
        return math.prod(self.shape)

    @property
    def moving(self) -> int:
        """Elements that its owner does not hold."""
        return sum(piece.numel for piece in self.pieces if piece.rank != self.owner)

    @property
    def stays(self) -> bool:
        """Whether its owner holds all of it, so that nothing of it moves."""
        return all(piece.rank == self.owner for piece in self.pieces)

    def load(self, state_dtype: str) -> Load:
        """What it asks of its owner."""
        size = sum(stack.part.shape[0] * state_bytes(self.role.matrix_cost(stack), state_dtype) for stack in self.role.stacks)
        return Load(self._work(), size, {piece.rank: piece.numel for piece in self.pieces})

    def _work(self) -> tuple[int, ...]:
        """Multiply-adds of the updates of one cycle of refreshes; several updates in one number where it is longer than LONGEST_CYCLE."""
        cycle = self.role.rate.limit_denominator(max(LONGEST_CYCLE, math.ceil(1 / self.role.rate)))
        length = min(cycle.denominator, LONGEST_CYCLE)
        costs = [self.role.matrix_cost(stack) for stack in self.role.stacks]
        work = [sum(stack.part.shape[0] * cost.update_madds for stack, cost in zip(self.role.stacks, costs))] * length
        for stack, cost in zip(self.role.stacks, costs):
            for offset in stack.offsets:
                for update in due_updates(cycle, offset):
                    work[update % length] += cost.refresh_madds * length // cycle.denominator
        return tuple(work)


def due_updates(rate: Fraction, offset: int) -> list[int]:
    """The updates of one cycle (modulo its length, the rate's denominator) at which a matrix is refreshed; as `refresh.is_due` says."""
    return [(-(-count * rate.denominator // rate.numerator) - offset) % rate.denominator for count in range(1, rate.numerator + 1)]


def units_of(name: str, shape: Sequence[int], role: Role, pieces: Sequence[Piece]) -> list[Unit]:
    """The units of a rotated parameter: each matrix by itself where whole ones are stacked in the leading dimension, else the parameter."""
    shape, count = tuple(shape), shape[0]
    if count == 1 or any(stack.part.kind != "stack" for stack in role.stacks):
        return [Unit(name, shape, role, tuple(pieces))]
    numel = math.prod(shape[1:])
    units = []
    for index in range(count):
        own = tuple(inner for piece in pieces if (inner := piece.within(index * numel, numel)))
        units.append(Unit(f"{name}[{index}]", (1, *shape[1:]), role.of_one(index), own))
    return units
