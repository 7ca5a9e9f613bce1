"""Slices of matrices to their owners and back: all-to-all, many matrices in one message, the next message under way meanwhile."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .units import Piece, Unit

# Elements that a rank sends or receives in one message, about: so many that latency does not matter, so few that buffers stay small and
# that there is another message to overlap with.
MESSAGE_NUMEL = 2**22

# The same between two ranks, where a matrix is cut over so many that their shares of a message would become too small.
PAIR_NUMEL = 2**16


Pieces = list[tuple[Unit, Piece]]


def messages(units: Sequence[Unit], numel: int | None = None) -> list[list[Unit]]:
    """The units that move, in groups that are sent together; the same on every rank.

    Each owner gets its units in the order given, in the first messages that have room, so that all have work at the same time. A message
    brings and takes no rank more than `numel` elements (None: by MESSAGE_NUMEL and PAIR_NUMEL), or the largest unit's where that has more.
    """
    units = [unit for unit in units if not unit.stays]
    if numel is None:
        numel = max(MESSAGE_NUMEL, PAIR_NUMEL * max((len(unit.pieces) for unit in units), default=0))
    numel = max([numel, *(unit.numel for unit in units)])
    result: list[list[Unit]] = []
    traffic: list[Counter[tuple[str, int]]] = []
    latest: Counter[int] = Counter()
    for unit in units:
        own = {("to", unit.owner): unit.moving} | {("from", p.rank): p.numel for p in unit.pieces if p.rank != unit.owner}
        number = latest[unit.owner]
        while number < len(result) and any(traffic[number][end] + size > numel for end, size in own.items()):
            number += 1
        if number == len(result):
            result.append([])
            traffic.append(Counter())
        result[number].append(unit)
        traffic[number].update(own)
        latest[unit.owner] = number
    return result


class Exchange:
    """Moves the slices of some units between the ranks of a group that hold them and the units' owners.

    Every rank of the group builds it for the same units in the same order, and calls its methods in the same order.

    Args:
        units: those that stay with their holder are passed over.
        group: process group; None: the default one.
        device: of the slices.
    """

    def __init__(self, units: Sequence[Unit], group: Any, device: torch.device):
        self._group, self._device, self.rank = group, device, dist.get_rank(group) if dist.is_initialized() else 0
        everyone = range(dist.get_world_size(group) if dist.is_initialized() else 1)
        self._held: list[Pieces] = [[] for _ in everyone]  # by owner: what this rank holds of its units
        self._owned: list[Pieces] = [[] for _ in everyone]  # by holder: what it holds of this rank's units
        moving = [unit for unit in units if not unit.stays]
        for unit in moving:
            for piece in unit.pieces:
                if piece.rank == self.rank:
                    self._held[unit.owner].append((unit, piece))
                if unit.owner == self.rank:
                    self._owned[piece.rank].append((unit, piece))
        self._moves = bool(moving)

    def gather(self, slices: Mapping[str, Tensor]) -> "Gathering":
        """Start sending slices to the owners.

        Args:
            slices: of each moving unit that this rank holds a slice of, flat, in float32, by the unit's name.
        """
        return Gathering(self, slices)

    def scatter(self, wholes: Mapping[str, Tensor]) -> "Scattering":
        """Start sending what this rank owns to those who hold slices of it.

        Args:
            wholes: each moving unit that this rank owns, flat, in float32, by name.
        """
        return Scattering(self, wholes)

    def _send(self, outgoing: list[Tensor], to: list[Pieces], since: list[Pieces]) -> tuple[Tensor, Any]:
        """Start one all-to-all of what goes to other ranks; what stays here does not pass through it."""
        sizes, expected = ([self._size(rank, pieces) for rank, pieces in enumerate(each)] for each in (to, since))
        received = torch.empty(sum(expected), dtype=torch.float32, device=self._device)
        if not self._moves:
            return received, None
        sent = torch.cat(outgoing) if outgoing else received.new_empty(0)
        return received, (dist.all_to_all_single(received, sent, expected, sizes, group=self._group, async_op=True), sent)

    def _size(self, rank: int, pieces: Pieces) -> int:
        return 0 if rank == self.rank else sum(piece.numel for _, piece in pieces)


class Gathering:
    """Slices on their way to their owners."""

    def __init__(self, exchange: Exchange, slices: Mapping[str, Tensor]):
        self._exchange = exchange
        self._own = {unit.name: slices[unit.name] for unit, _ in exchange._held[exchange.rank]}
        outgoing = [slices[unit.name] for rank, pieces in enumerate(exchange._held) if rank != exchange.rank for unit, _ in pieces]
        self._received, self._work = exchange._send(outgoing, exchange._held, exchange._owned)

    def wait(self) -> dict[str, Tensor]:
        """The wholes, flat, of the moving units that this rank owns, by name."""
        _finish(self._work)
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        place = 0
        for rank, pieces in enumerate(self._exchange._owned):
            for unit, piece in pieces:
                if rank == self._exchange.rank:
                    part = self._own[unit.name]
                else:
                    part = self._received[place : place + piece.numel]
                    place += piece.numel
                parts.setdefault(unit.name, []).append((piece.offset, part))
        in_order = {name: [part for _, part in sorted(of_one, key=lambda each: each[0])] for name, of_one in parts.items()}
        return {name: torch.cat(of_one) for name, of_one in in_order.items()}


class Scattering:
    """Owned units on their way to the holders of their slices."""

    def __init__(self, exchange: Exchange, wholes: Mapping[str, Tensor]):
        self._exchange = exchange
        self._own = {unit.name: _slice(wholes[unit.name], piece) for unit, piece in exchange._owned[exchange.rank]}
        outgoing = [
            _slice(wholes[unit.name], piece)
            for rank, pieces in enumerate(exchange._owned)
            if rank != exchange.rank
            for unit, piece in pieces
        ]
        self._received, self._work = exchange._send(outgoing, exchange._owned, exchange._held)

    def wait(self) -> dict[str, Tensor]:
        """This rank's slices of moving units, flat, by name."""
        _finish(self._work)
        slices, place = dict(self._own), 0
        for rank, pieces in enumerate(self._exchange._held):
            if rank != self._exchange.rank:
                for unit, piece in pieces:
                    slices[unit.name] = self._received[place : place + piece.numel]
                    place += piece.numel
        return slices


def _slice(whole: Tensor, piece: Piece) -> Tensor:
    return whole[piece.offset : piece.offset + piece.numel]


def _finish(work: Any) -> None:
    if work is not None:
        work[0].wait()
