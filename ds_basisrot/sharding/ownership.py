"""Who owns which matrix: balanced over the ranks of a group in memory and in each update, with as little moving as that allows."""

import heapq
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

# Percent that the fullest and the busiest rank may have beyond those of greedy assignment, so that fewer matrices move.
TOLERANCE = 10

# The same for the sum of the busiest ranks of each update, beyond the assignment that spreads every update best.
TOLERANCE_OF_UPDATES = 25

# What ranks are filled up to where matrices stay, in percent beyond the balanced ones, of (bytes and work, work of each update).
LIMITS = ((10, 25), (5, 10), (0, 0))

# Refreshes repeat after so many updates at most, as far as balance is concerned.
LONGEST_CYCLE = 64

# All bytes, and all multiply-adds, in the integers that are balanced: sums of products of two of them stay below 2^63.
WHOLE = 2**24


@dataclass(frozen=True)
class Load:
    """What a matrix asks of its owner.

    Attributes:
        work: multiply-adds of each update of a cycle of refreshes, of at most LONGEST_CYCLE updates.
        state_bytes: of its state.
        held: elements of the matrix on each rank that holds any.
    """

    work: tuple[int, ...]
    state_bytes: int
    held: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Ownership:
    """The outcome.

    Attributes:
        owners: rank of each matrix.
        madds: multiply-adds of each rank in an update, on average over a cycle of refreshes.
        busiest_madds: of the rank that has most to do in an update, on average over a cycle: what all ranks wait for.
        state_bytes: of each rank.
        sent, received: elements that each rank sends to owners, and receives as an owner, before an update; they go back after it.
    """

    owners: tuple[int, ...]
    madds: tuple[int, ...]
    busiest_madds: int
    state_bytes: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Bytes of the fullest rank, relative to the mean one: 1 is perfect balance."""
        return max(self.state_bytes) * len(self.state_bytes) / max(1, sum(self.state_bytes))

    @property
    def work_imbalance(self) -> float:
        """The same of multiply-adds, of whoever is the busiest rank in each update."""
        return self.busiest_madds * len(self.madds) / max(1, sum(self.madds))


def assign(loads: Sequence[Load], ranks: int, before: Sequence[tuple[int, int]] | None = None) -> Ownership:
    """Distribute matrices over the ranks 0 ... `ranks` - 1, in exact arithmetic, so that every rank of a group finds the same owners.

    The measure is greedy assignment: the heaviest matrix first, each to the least loaded rank. The fullest rank gets at most TOLERANCE more
    bytes than where matrices are assigned so by their bytes alone, and the busiest one at most as much more work than where they are
    assigned by their work alone; where both cannot be had together, as much more as where a matrix weighs its shares of both. Ranks wait
    for each other in every update, so what falls into one update is spread too: a matrix goes where it meets least of its own kind of
    load, which is a product of two vectors.

    Within that, matrices stay at the rank that holds most of them. Where too many would, a rank gives away those that relieve it most for
    what is moved; where that leaves no room for them, the heaviest matrices choose first. The outcome that moves less is taken.

    Args:
        before: (multiply-adds, bytes) that each rank has already, from matrices of another group.
    """
    before = [(0, 0)] * ranks if before is None else list(before)
    balance, cycle = _Balance(loads, ranks, before), _cycle(loads)
    owners = balance.owners()
    sent, received = balance.exchanged(owners)
    size, work = [size for _, size in before], [[madds] * cycle for madds, _ in before]
    for load, owner in zip(loads, owners):
        size[owner] += load.state_bytes
        for update in range(cycle):
            work[owner][update] += load.work[update % len(load.work)]
    return Ownership(
        owners=tuple(owners),
        madds=tuple(sum(each) // cycle for each in work),
        busiest_madds=sum(map(max, zip(*work))) // cycle,
        state_bytes=tuple(size),
        sent=tuple(sent),
        received=tuple(received),
    )


def _cycle(loads: Sequence[Load]) -> int:
    """Updates after which the work of all of them repeats; where that takes long, the longest cycle of one of them."""
    lengths = {len(load.work) for load in loads} or {1}
    together = math.lcm(*lengths)
    return together if together <= LONGEST_CYCLE else max(lengths)


class _Balance:
    """The search for owners. What is balanced has columns: bytes, work of a whole cycle, work of each update of it."""

    def __init__(self, loads: Sequence[Load], ranks: int, before: Sequence[tuple[int, int]]):
        cycle = _cycle(loads)
        work = [[load.work[update % len(load.work)] for update in range(cycle)] for load in loads]
        all_madds = max(1, sum(map(sum, work)) + cycle * sum(madds for madds, _ in before))
        all_bytes = max(1, sum(load.state_bytes for load in loads) + sum(size for _, size in before))

        def columns(size: int, madds: Sequence[int]) -> list[int]:
            updates = [each * cycle * WHOLE // all_madds for each in madds]
            return [size * WHOLE // all_bytes, sum(updates), *updates]

        rows = [columns(load.state_bytes, each) for load, each in zip(loads, work)]
        self._loads = _integers(chain.from_iterable(rows)).reshape(len(loads), cycle + 2).clamp_(min=1)
        rows = [columns(size, [madds] * cycle) for madds, size in before]
        self._start = _integers(chain.from_iterable(rows)).reshape(ranks, cycle + 2)
        # How loads add up: bytes count as much as the work of all updates.
        self._importance = _integers([cycle, 0] + [1] * cycle)
        self._weights = (self._loads * self._importance).sum(1)
        self._held = torch.zeros(len(loads), ranks, dtype=torch.int64, device="cpu")
        of = torch.arange(len(loads), device="cpu").repeat_interleave(_integers(len(load.held) for load in loads))
        at = _integers(chain.from_iterable(load.held for load in loads))
        self._held[of, at] = _integers(chain.from_iterable(load.held.values() for load in loads))
        # In tenths of what the rank with most holds, rounded up, so that nearly equal parts are equal.
        self._nearness = -(-10 * self._held // self._held.amax(1, keepdim=True).clamp(min=1))

    def owners(self) -> list[int]:
        """The rank of each matrix."""
        everything = self._heaviest_first(range(len(self._weights)))
        spread, home = self._placed(everything), self._placed(everything, self._nearness)
        highest = self._filled(spread).amax(0)
        best = torch.stack([self._filled(self._greedy(self._loads[:, c], self._start[:, c])).amax(0)[c] for c in (0, 1)])
        allowed, allowed_of_updates = best * (100 + TOLERANCE) // 100, highest[2:].sum() * (100 + TOLERANCE_OF_UPDATES) // 100

        def is_balanced(owners: list[int]) -> bool:
            filled = self._filled(owners).amax(0)
            return bool((filled[:2] <= allowed).all() and filled[2:].sum() <= allowed_of_updates)

        for slack, slack_of_updates in LIMITS:
            limit = torch.cat([torch.minimum(best, highest[:2]) * (100 + slack), highest[2:] * (100 + slack_of_updates)]) // 100
            given_away, filled = self._given_away(home, limit)
            candidates = [self._placed(given_away, self._nearness, limit, home, filled)]
            if given_away:
                candidates.append(self._placed(everything, self._nearness, limit))
            candidates = [owners for owners in candidates if is_balanced(owners)]
            if candidates:
                return min(candidates, key=self._moved)
        return spread if is_balanced(spread) else self._greedy(self._weights, (self._start * self._importance).sum(1))

    def exchanged(self, owners: Sequence[int]) -> tuple[list[int], list[int]]:
        """Elements that each rank sends to owners, and receives as an owner."""
        owner = _integers(owners)
        away = self._held.scatter(1, owner[:, None], 0)
        return away.sum(0).tolist(), torch.zeros_like(self._start[:, 0]).index_add(0, owner, away.sum(1)).tolist()

    @staticmethod
    def _greedy(amounts: Tensor, start: Tensor) -> list[int]:
        """Greedy assignment by one amount of each matrix, where ranks start with some."""
        amounts, queue = amounts.tolist(), [(filled, rank) for rank, filled in enumerate(start.tolist())]
        heapq.heapify(queue)
        owners = [0] * len(amounts)
        for index in sorted(range(len(amounts)), key=lambda index: (-amounts[index], index)):
            filled, owners[index] = queue[0]
            heapq.heapreplace(queue, (filled + amounts[index], owners[index]))
        return owners

    def _placed(
        self,
        indices: Sequence[int],
        nearness: Tensor | None = None,
        limit: Tensor | None = None,
        others: Sequence[int] | None = None,
        filled: Tensor | None = None,
    ) -> list[int]:
        """Owners of all, where matrices get one in this order: of the nearest ranks with room, the one with least of their kind of load.

        Args:
            nearness: `[matrices, ranks]`; None: all ranks are alike.
            limit: of each column; where no rank has room, all have.
            others: owners of all the others.
            filled: what ranks have of those `[ranks, columns]`; it is brought up to date.
        """
        owners = [0] * len(self._weights) if others is None else list(others)
        filled = self._start.clone() if filled is None else filled
        pull, largest = self._loads * self._importance, torch.iinfo(torch.int64).max
        for index in indices:
            load, meets = self._loads[index], filled @ pull[index]
            if nearness is not None:
                near = nearness[index]
                if limit is not None:
                    near = near.masked_fill((filled + load > limit).any(1), -1)
                meets = meets.masked_fill(near != near.max(), largest)
            owner = int(meets.argmin())
            owners[index] = owner
            filled[owner] += load
        return owners

    def _given_away(self, owners: Sequence[int], limit: Tensor) -> tuple[list[int], Tensor]:
        """What ranks beyond the limit give away, the heaviest first, and what all ranks have then `[ranks, columns]`.

        They give those first that relieve them most for what is moved.
        """
        given_away, filled, of_rank = [], self._filled(owners), [[] for _ in self._start]
        for index, owner in enumerate(owners):
            of_rank[owner].append(index)
        for rank in (filled > limit).any(1).nonzero().flatten().tolist():
            own = of_rank[rank]
            while own and (over := filled[rank] > limit).any():
                relief = self._loads[own][:, over].sum(1) / self._held[own, rank].clamp(min=1).double()  # exactly rounded everywhere
                index = own.pop(int(relief.argmax()))
                filled[rank] -= self._loads[index]
                given_away.append(index)
        return self._heaviest_first(given_away), filled

    def _filled(self, owners: Sequence[int]) -> Tensor:
        """What each rank has: `[ranks, columns]`."""
        return self._start.index_add(0, _integers(owners), self._loads)

    def _moved(self, owners: Sequence[int]) -> int:
        """Elements that are not held by the owner, in all."""
        return sum(self.exchanged(owners)[0])

    def _heaviest_first(self, indices: Sequence[int]) -> list[int]:
        weights = self._weights.tolist()
        return sorted(indices, key=lambda index: (-weights[index], index))


def _integers(values: Iterable[int]) -> Tensor:
    """As `torch.tensor`, but fast for millions of values."""
    numbers = array("q", values)
    return torch.frombuffer(numbers, dtype=torch.int64).clone() if numbers else torch.empty(0, dtype=torch.int64, device="cpu")
