"""What the first and the last stage have read of the data iterators: both read as far ahead, and nothing is lost or seen twice."""

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..pipeline.wire import Payload, as_tuple

Microbatch = tuple[Payload | None, Payload | None]
"""(inputs on the first stage, labels on the last)."""

MOST_KEPT = 16


class Feed:
    """One iterator and what was read of it but not trained."""

    def __init__(self, iterator: Any):
        self._strong, self._weak = None, None
        try:
            self._weak = weakref.ref(iterator)
        except TypeError:  # Python's own iterators: whoever holds one cannot be known
            self._strong = iterator
        self.items: deque[Microbatch] = deque()
        self.ended = False

    @property
    def iterator(self) -> Any:
        return self._strong if self._weak is None else self._weak()

    def fill(self, number: int, load: Callable[[], Microbatch]) -> None:
        """Read until `number` microbatches are there, or the iterator ends."""
        while len(self.items) < number and not self.ended:
            try:
                self.items.append(load())
            except StopIteration:
                self.ended = True


class Feeds:
    """The iterators that `train_batch()` was given, and the one it is given now.

    A call trains the next microbatches of the iterator that it is given. What had been read ahead of another one stays with that one and
    is trained when it comes back; once nobody holds that iterator any more, it is forgotten: DeepSpeed's schedule would not have read it.

    Args:
        load: reads one microbatch of the engine's present iterator; raises StopIteration at its end.
    """

    def __init__(self, load: Callable[[], Microbatch]):
        self._load = load
        self.now: Feed | None = None
        self._kept: list[Feed] = []
        self._restored: list[Microbatch] | None = None  # of a checkpoint; None: none was loaded since the present iterator came
        self._to_settle = False  # whether the present iterator is new, and `settle` has not decided yet

    def select(self, iterator: Any) -> bool:
        """Let `iterator` be the present one; whether it was another one before.

        Raises:
            RuntimeError: too many iterators were left in the middle.
        """
        if self.now is not None and self.now.iterator is iterator:
            if self.now.items or not self._to_settle:
                self._restored = None
            return False
        if self.now is not None and self.now.items:
            self._kept.append(self.now)
        self._kept = [feed for feed in self._kept if feed.iterator is not None]
        if len(self._kept) > MOST_KEPT:
            raise RuntimeError(
                f"train_batch(): {len(self._kept)} iterators were left with microbatches read ahead; pass one iterator to all calls"
            )
        known = next((feed for feed in self._kept if feed.iterator is iterator), None)
        if known is not None:
            self._kept.remove(known)
            self._restored = None
        self.now, self._to_settle = known or Feed(iterator), known is None
        return True

    def has_ended(self, needed: int) -> bool:
        """Whether the present iterator has ended before, with fewer than `needed` microbatches left."""
        return self.now.ended and len(self.now.items) < needed

    def fill(self, number: int, needed: int) -> int:
        """Read ahead until `number` microbatches are there; returns how many are, fewer at the end of the data.

        An iterator that had ended with fewer than `needed` left is asked again: some begin anew, as those of loaders do that are their own
        iterators.
        """
        if self.has_ended(needed):
            self.now.ended = False
        self.now.fill(number, self._load)
        return len(self.now.items)

    def __getitem__(self, index: int) -> Microbatch:
        """The microbatch that is `index` after the last trained one."""
        return self.now.items[index]

    def trained(self, number: int) -> None:
        """Forget the first `number` microbatches."""
        for _ in range(number):
            self.now.items.popleft()

    # -- checkpoints -------------------------------------------------------------------------------------------------------------------

    def read_ahead(self) -> list[Microbatch]:
        """What was read of the present iterator but not trained; right after a checkpoint was loaded, what that one had read ahead."""
        if self._restored is not None:
            return list(self._restored)
        return list(self.now.items) if self.now is not None else []

    def restore(self, items: list[Microbatch]) -> None:
        """What a checkpoint had read ahead, for an iterator that this process has not seen yet."""
        self._restored = items

    def settle(self, use_restored: bool | None) -> bool:
        """Decide whether what a checkpoint had read ahead comes before the present iterator.

        An iterator that was set to the first microbatch that was not trained yields what had been read ahead once more; one that restored
        its own state, from when the checkpoint was written, goes on after that. What it yields first tells which it is.

        Args:
            use_restored: the decision, where the first stage has taken it; None: take it.

        Raises:
            RuntimeError: the first stage uses what had been read ahead, and there is nothing of it here.
        """
        restored = self._restored
        if use_restored and not restored:
            raise RuntimeError("train_batch(): the checkpoint has inputs that had been read ahead, but no labels: it is damaged")
        if not restored or self.now.items:
            use_restored = False
        elif use_restored is None:
            self.fill(1, 0)  # where it raises nothing is decided, and a script may call again
            use_restored = not (self.now.items and _equal(self.now.items[0], restored[0]))
        self._restored, self._to_settle = None, False
        if use_restored:
            self.now.items.extendleft(reversed(restored))
        return use_restored


def _equal(one: Microbatch, other: Microbatch) -> bool:
    for a, b in itertools.zip_longest(one, other):
        if (a is None) != (b is None) or isinstance(a, tuple) != isinstance(b, tuple):
            return False
        if a is not None and (len(as_tuple(a)) != len(as_tuple(b)) or not all(map(_same, as_tuple(a), as_tuple(b)))):
            return False
    return True


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b.to(a.device)))


def are_tensors(items: list[Microbatch]) -> bool:
    """Whether all payloads are tensors or tuples of them, which `to_tensors` can take."""
    payloads = [p for item in items for p in item if p is not None]
    return all(isinstance(t, Tensor) for p in payloads for t in as_tuple(p))


def to_tensors(items: list[Microbatch]) -> tuple[dict[str, Tensor], list[list[int | None]]]:
    """Microbatches as named tensors, and how many each payload has (-1: a tensor, not a tuple; None: no payload)."""
    tensors, shape = {}, []
    for index, item in enumerate(items):
        shape.append([None if p is None else len(p) if isinstance(p, tuple) else -1 for p in item])
        for part, payload in zip(("inputs", "labels"), item):
            for place, tensor in enumerate(as_tuple(payload) if payload is not None else ()):
                tensors[f"read_ahead.{index}.{part}.{place}"] = tensor.detach().contiguous().clone()
    return tensors, shape


def from_tensors(shape: list[list[int | None]], get: Callable[[str], Tensor]) -> list[Microbatch]:
    """The microbatches that `to_tensors` took apart."""

    def payload(index: int, part: str, number: int | None) -> Payload | None:
        if number is None:
            return None
        tensors = tuple(get(f"read_ahead.{index}.{part}.{place}") for place in range(1 if number < 0 else number))
        return tensors[0] if number < 0 else tensors

    return [tuple(payload(index, part, n) for part, n in zip(("inputs", "labels"), numbers)) for index, numbers in enumerate(shape)]
