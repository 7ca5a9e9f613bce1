"""A flat buffer of weights on one rank, and what it holds: slices, matrices that this rank owns, and messages to other owners."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim.gradient_gate import Gate, largest_elements
from ..optim.roles import Role
from .exchange import Exchange, messages
from .units import Piece, Unit, units_of


@dataclass(frozen=True)
class Flat:
    """A flat buffer of float32 master weights, which takes the place of parameters in the optimizer's groups.

    Attributes:
        buffer: this rank's `[k]`; the optimizer finds it in a group, with its gradient.
        group: process group over which the parameters are sliced; None: the default one.
        parameters: name and slices, on all ranks, of each parameter in it; the same on every rank of the group.
        labels: by parameter, what is put before the name in checkpoints, where parameters of equal names differ between process groups
            (experts, modules that pipeline stages share in part).
    """

    buffer: Tensor
    group: Any
    parameters: Sequence[tuple[str, Sequence[Piece]]]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Member:
    """A parameter of this rank's own updates: a slice that it holds, a matrix that it holds and owns, or one that is brought to it.

    Attributes:
        p: stands for it; its state's key. What moves has elements during an update only.
        parameter: name of the parameter that it is, or is of.
        index: among everything in the buffer.
        piece: where it lies in the buffer; None: it moves.
    """

    p: Tensor
    name: str
    parameter: str
    shape: tuple[int, ...]
    role: Role
    index: int
    piece: Piece | None

    @property
    def moves(self) -> bool:
        """Whether it is brought here from other ranks."""
        return self.piece is None

    @property
    def numel(self) -> int:
        """Elements of it."""
        return math.prod(self.shape)

    def release(self) -> None:
        """Give up gradient and elements until the next update."""
        self.p.grad = None
        self.p.data = self.p.data.new_empty(0)


@dataclass
class Message:
    """What moves at one time.

    Attributes:
        owned: by this rank.
        held: unit, its index in the buffer, and the slice of it on this rank.
    """

    exchange: Exchange
    owned: list[Member]
    held: list[tuple[Unit, int, Piece]]

    def receive(self, wholes: Mapping[str, Tensor]) -> None:
        """Take in the gradients. The weight that is updated is zero, so that the update is left in it."""
        for member in self.owned:
            member.p.data = torch.zeros(member.shape, device=wholes[member.name].device)
            member.p.grad = wholes[member.name].view(member.shape)

    def results(self) -> dict[str, Tensor]:
        """The updates, flat; the members give up their storage."""
        updates = {member.name: member.p.data.flatten() for member in self.owned}
        for member in self.owned:
            member.release()
        return updates


@dataclass
class Buffer:
    """A flat buffer and what it holds."""

    flat: Flat
    rank: int
    ranks: int
    units: list[tuple[Unit, str, int]] = field(default_factory=list)  # unit, parameter, index in its stack
    members: list[Member] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    started: list[bool] = field(default_factory=list)  # of everything in it: whether there ever was a gradient
    names: list[str] = field(default_factory=list)  # of the same, with the labels
    _pieces: list[tuple[int, Piece]] = field(default_factory=list)  # on this rank, with the index of what they are of
    _unit_indices: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Of everything in it."""
        return len(self.started)

    def label(self, parameter: str) -> str:
        """See `Flat`."""
        return self.flat.labels.get(parameter, "")

    def add(self, name: str, shape: tuple[int, ...], role: Role, pieces: tuple[Piece, ...]) -> None:
        """Append a parameter."""
        if not role.stacks:
            self._add_pieces(name, name, pieces)
            own = next((piece for piece in pieces if piece.rank == self.rank), None)
            if own is not None:
                self.members.append(
                    Member(torch.empty(0, device=self.flat.buffer.device), name, name, (own.numel,), role, self.count - 1, own)
                )
            return
        for index, unit in enumerate(units_of(name, shape, role, pieces)):
            self._add_pieces(name, unit.name, unit.pieces)
            self._unit_indices.append(self.count - 1)
            self.units.append((unit, name, index))

    def _add_pieces(self, parameter: str, name: str, pieces: Sequence[Piece]) -> None:
        self.names.append(self.label(parameter) + name)
        self._pieces += [(self.count, piece) for piece in pieces if piece.rank == self.rank]
        self.started.append(False)

    def take_owners(self) -> None:
        """Owners are known: the matrices of this rank, and what moves when."""
        device, owned = self.flat.buffer.device, {}
        for (unit, parameter, _), index in zip(self.units, self._unit_indices):
            if unit.owner == self.rank:
                piece, p = unit.pieces[0] if unit.stays else None, torch.empty(0, device=device)
                owned[unit.name] = Member(p, unit.name, parameter, unit.shape, unit.role, index, piece)
        self.members += owned.values()
        self._piece_indices = torch.tensor([index for index, _ in self._pieces], dtype=torch.long, device=device)
        self._member_indices = torch.tensor([member.index for member in self.members], dtype=torch.long, device=device)
        indices = {unit.name: index for (unit, _, _), index in zip(self.units, self._unit_indices)}
        moving = [unit for unit, _, _ in self.units if not unit.stays]
        for batch in messages(moving):
            held = [(unit, indices[unit.name], piece) for unit in batch for piece in unit.pieces if piece.rank == self.rank]
            mine = [owned[unit.name] for unit in batch if unit.owner == self.rank]
            self.messages.append(Message(Exchange(batch, self.flat.group, device), mine, held))

    def largest(self, number: int) -> int:
        """The largest of the numbers that the ranks of the group give."""
        if self.ranks == 1:
            return number
        of_all = torch.tensor(number, device=self.flat.buffer.device)
        dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=self.flat.group)
        return int(of_all)

    def own_sizes(self) -> Tensor:
        """Largest elements in this rank's slices of the gradients of everything, zero for what it has no slice of: float64 `[count]`."""
        sizes = torch.zeros(self.count, dtype=torch.float64, device=self.flat.buffer.device)
        if self._pieces:
            largest = largest_elements([self.gradient(piece) for _, piece in self._pieces])
            sizes.index_copy_(0, self._piece_indices, largest.to(sizes.device))
        return sizes

    def of_members(self, sizes: Tensor) -> Tensor:
        """Of values for everything `[count]`, those of the members."""
        return sizes[self._member_indices]

    def note_started(self, sizes: Tensor, gate: Gate) -> None:
        """Remember what has had a gradient in an update that the gate let through; from then on it decays."""
        if not all(self.started) and (gate.flag is None or bool(gate.flag)):
            self.started = [was or size > 0.0 for was, size in zip(self.started, sizes.tolist())]

    def place_members(self) -> None:
        """Members that lie in the buffer take their place in it."""
        for member in self.members:
            if member.piece is not None:
                member.p.data = self.weight(member.piece).view(member.shape)
                gradient = self.gradient(member.piece)
                member.p.grad = (gradient.clone() if member.role.stacks else gradient).view(member.shape)  # products like aligned memory

    def release_members(self) -> None:
        """Forget gradients and what moved."""
        for member in self.members:
            member.release()

    def weight(self, piece: Piece) -> Tensor:
        """A slice of the weights."""
        return piece.of(self.flat.buffer.data)

    def gradient(self, piece: Piece) -> Tensor:
        """A slice of the gradient."""
        return piece.of(self.flat.buffer.grad)
