"""Weight stashing: forward and backward of a microbatch see one version of a stage's weights, at one copy of the weights per update."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _Snapshot:
    """A copy of the weights after some number of updates, and how many microbatches in flight still need it."""

    def __init__(self, tensors: list[Tensor]):
        self.tensors, self.users = tensors, 0


class _Forwarded(NamedTuple):
    """What the backward of a microbatch needs of its forward: the weights' in-place counters, and the snapshot it saw."""

    counters: tuple[int, ...]
    snapshot: _Snapshot | None


class WeightVersions:
    """The versions of one stage's weights that microbatches in flight were forwarded with.

    A forward runs on a snapshot of the newest weights, taken once after an update, at the latest at the first forward, and shared by all
    forwards until the next one; the backward runs on the same snapshot. Both swap the parameters' storage, nothing is copied for a single
    microbatch. The storage that the optimizer updates is never moved, so wrappers that keep flat views of it work.

    Autograd refuses a backward through weights that were changed in place since the forward. Here they are meant to have changed, by the
    optimizer or by anybody else between two calls, and the backward either sees its snapshot or wants the newest: so it runs with the
    counters of its forward.

    Args:
        parameters: the parameters that the optimizer updates.
        stashing: False forwards and back-propagates on the newest weights at the time of each: activations come from older weights.
        predict: gives what is added to a snapshot of the newest weights, by parameter; None: nothing.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], stashing: bool, predict: Callable[[], dict[Tensor, Tensor]] | None = None):
        self._parameters, self._predict = tuple(parameters), predict
        self._stashing = stashing and bool(self._parameters)
        self._newest: _Snapshot | None = None
        self._in_flight: dict[int, _Forwarded] = {}
        self._free: list[_Snapshot] = []
        self._live: list[Tensor] = []
        self._places = {p: place for place, p in enumerate(self._parameters)}

    def newest(self, parameter: Tensor) -> Tensor | None:
        """The newest weights of a parameter that holds a snapshot at present, None where it holds the newest."""
        place = self._places.get(parameter)
        return self._live[place] if self._live and place is not None else None

    def prepare(self) -> None:
        """Take the snapshot that the next forward runs on, where one is due: before the wait for that forward's input."""
        if self._stashing and self._newest is None:
            self._newest = self._take_snapshot()

    @property
    def alive(self) -> int:
        """Snapshots in use."""
        return len({id(s) for s in [*self._snapshots_in_flight(), self._newest] if s is not None})

    @property
    def weight_bytes(self) -> int:
        """Size of one snapshot, in bytes."""
        return sum(p.numel() * p.element_size() for p in self._parameters)

    @property
    def stash_bytes(self) -> int:
        """Memory of all snapshots, in use or kept for the next one, in bytes."""
        return self.weight_bytes * (self.alive + len(self._free))

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Run the forward of `microbatch` in here."""
        self.prepare()
        if self._newest is not None:
            self._newest.users += 1
        self._in_flight[microbatch] = _Forwarded(self._counters(), self._newest)
        self._swap_in(self._newest)
        try:
            yield
        finally:
            self._swap_out()

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Run the backward of `microbatch` in here; its version is given up afterwards."""
        counters, snapshot = self._in_flight.pop(microbatch)
        now = self._counters()
        self._set_counters(counters)
        self._swap_in(snapshot)
        try:
            yield
        finally:
            self._swap_out()
            self._set_counters(now)
        if snapshot is not None:
            snapshot.users -= 1
            self._recycle(snapshot)

    def changed(self) -> None:
        """Tell that the weights are new: the next forward takes a snapshot of them."""
        previous, self._newest = self._newest, None
        if previous is not None:
            self._recycle(previous)

    def drop(self) -> None:
        """Forget the microbatches in flight: their backwards will not run."""
        for snapshot in {id(s): s for s in self._snapshots_in_flight()}.values():
            snapshot.users = 0
            self._recycle(snapshot)
        self._in_flight.clear()
        self.changed()

    def _snapshots_in_flight(self) -> list[_Snapshot]:
        return [f.snapshot for f in self._in_flight.values() if f.snapshot is not None]

    def _counters(self) -> tuple[int, ...]:
        return tuple(p._version for p in self._parameters)

    def _set_counters(self, counters: tuple[int, ...]) -> None:
        if self._parameters:
            torch._C._autograd._unsafe_set_version_counter(self._parameters, counters)

    def _take_snapshot(self) -> _Snapshot:
        live = [p.data for p in self._parameters]
        snapshot = self._free.pop() if self._free else _Snapshot([torch.empty_like(t) for t in live])
        torch._foreach_copy_(snapshot.tensors, live)
        if self._predict is not None:
            changes = self._predict()
            for p, tensor in zip(self._parameters, snapshot.tensors):
                if p in changes:
                    tensor += changes[p].detach().to(tensor.dtype)
        return snapshot

    def _recycle(self, snapshot: _Snapshot) -> None:
        if snapshot.users == 0 and snapshot is not self._newest:
            self._free.append(snapshot)

    def _swap_in(self, snapshot: _Snapshot | None) -> None:
        """Let the parameters hold a snapshot; None: what they hold."""
        if snapshot is not None:
            torch.clear_autocast_cache()  # it holds low-precision copies of weights, by parameter and not by version
            self._live = [p.data for p in self._parameters]
            for p, tensor in zip(self._parameters, snapshot.tensors):
                p.data = tensor

    def _swap_out(self) -> None:
        """Let the parameters hold the newest weights."""
        if self._live:
            for p, tensor in zip(self._parameters, self._live):
                p.data = tensor
            self._live = []
            torch.clear_autocast_cache()
