"""The matrices that move and are owned one by one, and where their elements lie: slices of flat buffers on the ranks of a group."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..optim.costs import state_bytes
from ..optim.roles import Role
from .ownership import Load


@dataclass(frozen=True)
class Piece:
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
        held: dict[int, int] = {}
        for piece in self.pieces:
            held[piece.rank] = held.get(piece.rank, 0) + piece.numel
        refresh = sum(self.role.refresh_costs())
        updates = sum(stack.part.shape[0] * self.role.matrix_cost(stack).update_madds for stack in self.role.stacks)
        size = sum(stack.part.shape[0] * state_bytes(self.role.matrix_cost(stack), state_dtype) for stack in self.role.stacks)
        return Load(updates + int(refresh * self.role.rate), size, held, self.role.stacks[0].offsets[0])


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
