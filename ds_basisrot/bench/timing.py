"""Times the updates of several optimizers side by side: they take turns, one update each, so that a slow moment of the machine hits all."""

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor, nn

from .contestants import Contestant
from .gradients import GradientPool
from .state_size import state_bytes

WEIGHT_STD = 0.02
PEAK_REPETITIONS = 5


@dataclass
class Timing:
    """Times of one optimizer's updates in ms, in their order, and the bytes of its state at the end.

    Attributes:
        periods: how many `update_ms` is about.
        first_update_ms: of the update that builds the state and the first basis.
        warm_up_ms: of the period after it, which fills caches and loads libraries.
        update_ms: of the updates that count.
    """

    periods: int = 1

    first_update_ms: float = 0.0
    warm_up_ms: list[float] = field(default_factory=list)
    update_ms: list[float] = field(default_factory=list)
    state_bytes: int = 0

    def statistics(self) -> dict[str, float]:
        """`statistics` of the updates that count."""
        return statistics(self.update_ms)

    def quiet_statistics(self) -> dict[str, float]:
        """The same of one period without disturbance: for each place in the period, where the work is the same, the fastest of the periods.

        What else runs on a machine only ever adds time, and rarely hits the same place in every period.
        """
        return statistics(numpy.reshape(self.update_ms, (self.periods, -1)).min(axis=0))


def statistics(times_ms: Sequence[float]) -> dict[str, float]:
    """Mean, median, 95th percentile and maximum, in ms.

    The percentile interpolates linearly between the order statistics: of n times it is at position 0.95 (n - 1), counted from 0.
    """
    times = numpy.asarray(times_ms)
    return {
        "mean_ms": float(times.mean()),
        "median_ms": float(numpy.median(times)),
        "p95_ms": float(numpy.percentile(times, 95, method="linear")),
        "max_ms": float(times.max()),
    }


class NotTrained(Exception):
    """The weights of an optimizer did not move, or are not finite: its times mean nothing."""


def rounds_of(contestant: Contestant, updates: int, period: int) -> list[int]:
    """The rounds in which it makes an update: 0 is the first update, then come a period to warm up and `updates` that count."""
    return [0, *(1 + place for place in range(period + updates) if place % period % contestant.every_rounds == 0)]


def measure(
    contestants: Sequence[Contestant],
    block_shapes: Sequence[tuple[int, int]],
    blocks: int,
    updates: int,
    period: int,
    device: torch.device,
    seed: int,
    on_update: Callable[[str], None],
) -> dict[str, Timing]:
    """Time the contestants' updates on the same weights and the same gradients. The order within each round is drawn anew.

    Args:
        block_shapes: [m, n] of each weight matrix of one block.
        blocks: how many of them.
        updates: rounds that count, a multiple of `period`.
        period: updates between two bases, and updates to warm up.
        seed: of weights, gradients and order.
        on_update: called with the contestant's name after each of its updates, outside of the timed section.

    Raises:
        NotTrained: naming the contestant.
    """
    pool = GradientPool(block_shapes, period + 1, seed, device)
    buffers = [[torch.zeros(shape, device=device) for shape in block_shapes] for _ in range(blocks)]
    flat_buffers = [buffer for block in buffers for buffer in block]
    generator = torch.Generator().manual_seed(seed)
    start = [WEIGHT_STD * torch.randn(buffer.shape, generator=generator) for buffer in flat_buffers]
    weights = {each.name: [nn.Parameter(w.to(device, copy=True)) for w in start] for each in contestants}
    for each in weights.values():
        for weight, buffer in zip(each, flat_buffers):
            weight.grad = buffer
    optimizers = {each.name: each.build(weights[each.name]) for each in contestants}
    timings = {each.name: Timing(periods=updates // period) for each in contestants}
    rounds = {each.name: set(rounds_of(each, updates, period)) for each in contestants}
    order, shuffle = [each.name for each in contestants], random.Random(seed).shuffle

    collecting = gc.isenabled()
    gc.disable()
    gc.freeze()  # makes the collections between the rounds quick
    try:
        for number in range(1 + period + updates):
            shuffle(order)
            for name in order:
                if number in rounds[name]:
                    pool.fill(buffers, number)  # each time: an optimizer may write to its gradients
                    elapsed_ms = _timed_ms(optimizers[name].step, device)
                    timing = timings[name]
                    if number == 0:
                        timing.first_update_ms = elapsed_ms
                    else:
                        (timing.warm_up_ms if number <= period else timing.update_ms).append(elapsed_ms)
                    on_update(name)
            gc.collect()
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    for name, timing in timings.items():
        timing.state_bytes = state_bytes(optimizers[name])
        _check_trained(name, weights[name], start)
    return timings


def matmul_peak(shapes: Sequence[tuple[int, int]], device: torch.device) -> tuple[float, list[int]]:
    """Flops per second of the fastest float32 product among those that rotate `[m, n]` matrices, and its sizes [rows, inner, columns].

    Two flops per multiply-add; the best of a few repetitions of each.
    """
    best = (0.0, [0, 0, 0])
    for rows, inner, columns in sorted({size for m, n in shapes for size in ((m, m, n), (m, n, n))}):
        a, b = torch.ones(rows, inner, device=device), torch.ones(inner, columns, device=device)
        product = torch.empty(rows, columns, device=device)
        fastest_ms = min(_timed_ms(lambda a=a, b=b, out=product: torch.mm(a, b, out=out), device) for _ in range(1 + PEAK_REPETITIONS))
        best = max(best, (2 * rows * inner * columns / fastest_ms * 1e3, [rows, inner, columns]))
    return best


def _timed_ms(action: Callable[[], object], device: torch.device) -> float:
    _synchronise(device)
    started = time.perf_counter()
    action()
    _synchronise(device)
    return (time.perf_counter() - started) * 1e3


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _check_trained(name: str, weights: Sequence[Tensor], start: Sequence[Tensor]) -> None:
    for weight, before in zip(weights, start):
        after = weight.detach().cpu()
        if not after.isfinite().all():
            raise NotTrained(f"{name}: its weights are not finite; its times mean nothing")
        if torch.equal(after, before):
            raise NotTrained(f"{name}: its weights did not move; its times mean nothing")
