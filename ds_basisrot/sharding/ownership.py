"""Who owns which matrix: a balanced assignment over the ranks of a group that moves as little as it can."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# How much more than with plain greedy assignment the busiest rank may have to do, so that fewer matrices move: tried in this order.
SLACKS = (0.1, 0.05, 0.02, 0.0)


@dataclass(frozen=True)
class Load:
    """What a matrix asks of its owner.

    Attributes:
        madds: multiply-adds of an update, on average over the refresh period.
        state_bytes: of its state.
        held: elements of the matrix on each rank that holds any.
        turn: its place in the refresh period; matrices of one turn are spread over the ranks where that costs nothing else.
    """

    madds: int
    state_bytes: int
    held: Mapping[int, int] = field(default_factory=dict)
    turn: int = 0


@dataclass(frozen=True)
class Ownership:
    """The outcome.

    Attributes:
        owners: rank of each matrix.
        madds, state_bytes: of each rank, in all.
        received: elements that each rank receives from others before an update; as many go back after it.
    """

    owners: tuple[int, ...]
    madds: tuple[int, ...]
    state_bytes: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Bytes of the fullest rank, relative to the mean one: 1 is perfect balance."""
        return max(self.state_bytes) * len(self.state_bytes) / max(1, sum(self.state_bytes))


def assign(loads: Sequence[Load], ranks: int, before: Sequence[tuple[int, int]] | None = None) -> Ownership:
    """Distribute matrices over the ranks 0 ... `ranks` - 1.

    The weight of a matrix is its share of all multiply-adds plus its share of all bytes, in exact integers, so that every rank of a group
    finds the same owners. The heaviest come first. Each goes to the rank that holds most of it, as long as no rank then has more than
    `SLACKS` above what plain greedy assignment ends with, in which each goes to the least loaded rank.

    Args:
        before: (multiply-adds, bytes) that each rank has already, from matrices of another group.
    """
    before = [(0, 0)] * ranks if before is None else list(before)
    all_madds = max(1, sum(load.madds for load in loads) + sum(madds for madds, _ in before))
    all_bytes = max(1, sum(load.state_bytes for load in loads) + sum(size for _, size in before))
    weights = [load.madds * all_bytes + load.state_bytes * all_madds for load in loads]
    start = [madds * all_bytes + size * all_madds for madds, size in before]
    greedy = _place(loads, weights, start, limit=0)
    best = _fullest(greedy, weights, start)
    owners = greedy
    for slack in SLACKS:
        placed = _place(loads, weights, start, limit=round((1 + slack) * best))
        if _fullest(placed, weights, start) <= (1 + SLACKS[0]) * best:
            owners = placed
            break
    return Ownership(
        tuple(owners),
        tuple(_sums(owners, [load.madds for load in loads], [madds for madds, _ in before])),
        tuple(_sums(owners, [load.state_bytes for load in loads], [size for _, size in before])),
        tuple(_sums(owners, [sum(load.held.values()) - load.held.get(owner, 0) for load, owner in zip(loads, owners)], [0] * ranks)),
    )


def _place(loads: Sequence[Load], weights: Sequence[int], start: Sequence[int], limit: int) -> list[int]:
    """Owners, the heaviest matrix first: who holds most of it, up to `limit`; else the least loaded rank, and of those in its turn."""
    load_of, in_turn, owners = list(start), {}, [0] * len(loads)
    for index in sorted(range(len(loads)), key=lambda i: (-weights[i], i)):
        load, weight = loads[index], weights[index]
        turn = in_turn.setdefault(load.turn, [0] * len(load_of))
        holders = [rank for rank in load.held if load_of[rank] + weight <= limit]
        if holders:
            owner = min(holders, key=lambda rank: (-load.held[rank], load_of[rank], rank))
        else:
            owner = min(range(len(load_of)), key=lambda rank: (load_of[rank], turn[rank], rank))
        owners[index] = owner
        load_of[owner] += weight
        turn[owner] += weight
    return owners


def _fullest(owners: Sequence[int], weights: Sequence[int], start: Sequence[int]) -> int:
    return max(_sums(owners, weights, start))


def _sums(owners: Sequence[int], amounts: Sequence[int], start: Sequence[int]) -> list[int]:
    sums = list(start)
    for owner, amount in zip(owners, amounts):
        sums[owner] += amount
    return sums
