"""Slices of matrices to their owners and back: all-to-all, many matrices in one message, the next message under way meanwhile."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .units import Piece, Unit

# Elements that move in one message, about: so many that latency does not matter, so few that buffers stay small.
MESSAGE_NUMEL = 2**25


Pieces = list[tuple[Unit, Piece]]


def messages(units: Sequence[Unit], numel: int | None = None) -> list[list[Unit]]:
    """Units in the order given, cut into groups with about `numel` moving elements each (None: MESSAGE_NUMEL); the same on every rank."""
    limit = MESSAGE_NUMEL if numel is None else numel
    result: list[list[Unit]] = []
    size = limit
    for unit in units:
        if size >= limit:
            result.append([])
            size = 0
        result[-1].append(unit)
        size += unit.moving
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
        self._units = [unit for unit in units if not unit.stays]
        self._group, self._device, self.rank = group, device, dist.get_rank(group) if dist.is_initialized() else 0
        everyone = range(dist.get_world_size(group) if dist.is_initialized() else 1)
        self._held = [self._pieces(self.rank, owner) for owner in everyone]
        self._owned = [self._pieces(holder, self.rank) for holder in everyone]

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

    def _pieces(self, holder: int, owner: int) -> Pieces:
        """What one rank holds of another's units."""
        return [(unit, piece) for unit in self._units if unit.owner == owner for piece in unit.pieces if piece.rank == holder]

    def _send(self, outgoing: list[Tensor], to: list[Pieces], since: list[Pieces]) -> tuple[Tensor, Any]:
        """Start one all-to-all of what goes to other ranks; what stays here does not pass through it."""
        sizes = [self._size(rank, pieces) for rank, pieces in enumerate(to)]
        expected = [self._size(rank, pieces) for rank, pieces in enumerate(since)]
        received = torch.empty(sum(expected), device=self._device)
        if not self._units:
            return received, None
        sent = torch.cat(outgoing) if outgoing else torch.empty(0, device=self._device)
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
        wholes: dict[str, Tensor] = {}
        place = 0
        for rank, pieces in enumerate(self._exchange._owned):
            for unit, piece in pieces:
                whole = wholes.get(unit.name)
                if whole is None:
                    whole = wholes[unit.name] = self._received.new_empty(unit.numel)
                if rank == self._exchange.rank:
                    part = self._own[unit.name]
                else:
                    part = self._received[place : place + piece.numel]
                    place += piece.numel
                whole[piece.offset : piece.offset + piece.numel].copy_(part)
        return wholes


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
