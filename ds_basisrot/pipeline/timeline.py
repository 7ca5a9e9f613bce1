"""Event simulation of a pipeline with given times per stage: who works or waits when, how stale gradients are, what is stashed."""

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from .chrome_trace import BACKWARD, FORWARD, UPDATE, WAIT
from .schedule import Action, AsyncSchedule, Kind, staleness


class Span(NamedTuple):
    """What a stage did for some time.

    `kind` is FORWARD, BACKWARD, UPDATE or WAIT (for a message of `microbatch`, or for the other stages before an update). `version` counts
    the updates in the weights that a forward or backward ran with; for an update, those with it; for a wait, those made so far.
    """

    stage: int
    kind: str
    microbatch: int
    version: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Times:
    """What takes how long: one number per stage each, in ms. A message is received `latency_ms` after it was sent; sends block nobody."""

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    update_ms: tuple[float, ...]
    latency_ms: float = 0.0

    @classmethod
    def of(
        cls,
        stages: int,
        forward_ms: float | Sequence[float] = 1.0,
        backward_ms: float | Sequence[float] = 2.0,
        update_ms: float | Sequence[float] = 0.0,
        latency_ms: float = 0.0,
    ) -> "Times":
        """Times for `stages` stages, each given as one number for all of them or as one number per stage.

        Raises:
            ValueError: naming what has another number of values, is negative, not finite, or zero for forward and backward.
        """
        per_stage = {"forward_ms": forward_ms, "backward_ms": backward_ms, "update_ms": update_ms}
        lists = {name: per_stage_values(name, value, stages) for name, value in per_stage.items()}
        for name, values in {**lists, "latency_ms": (latency_ms,)}.items():
            may_be_zero = name in ("update_ms", "latency_ms")
            wrong = [v for v in values if not (0 <= v < math.inf) or (v == 0 and not may_be_zero)]
            if wrong:
                raise ValueError(f"{name}: must be finite and {'>= 0' if may_be_zero else '> 0'}, got {wrong[0]:g}")
        return cls(**lists, latency_ms=latency_ms)


def per_stage_values(name: str, value: float | Sequence[float], stages: int) -> tuple[float, ...]:
    """`value` for each stage: one number holds for all; ValueError naming `name` where there is another number of them."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(values) == 1:
        return values * stages
    if len(values) != stages:
        raise ValueError(f"{name}: give one number, or one for each of the {stages} stages, got {len(values)}")
    return values


class FlushingSchedule:
    """1F1B with a flush, as DeepSpeed's TrainSchedule runs it: each call fills the pipeline, drains it and makes one update.

    Before the update all stages wait for each other, as the norm of all gradients needs them to; that wait itself takes no time here, and
    sends block nobody, so this is what a flush costs at best.
    """

    def __init__(self, stages: int, accumulation: int = 1):
        if stages < 1 or accumulation < 1:
            raise ValueError(f"stages and accumulation: must be >= 1, got {stages} and {accumulation}")
        self.stages, self.accumulation = stages, accumulation

    def call(self, stage: int, first: int, filled: bool) -> list[Action]:
        """Actions of `stage` in the call that trains microbatches `first` .. `first + accumulation - 1`; `filled` changes nothing."""
        warm_up, actions = min(staleness(stage, self.stages), self.accumulation), []

        def forward(index: int) -> None:
            if stage > 0:
                actions.append(Action(Kind.RECV_ACTIVATION, first + index))
            actions.append(Action(Kind.FORWARD, first + index))
            if stage < self.stages - 1:
                actions.append(Action(Kind.SEND_ACTIVATION, first + index))

        for index in range(warm_up):
            forward(index)
        for index in range(self.accumulation):
            if index + warm_up < self.accumulation:
                forward(index + warm_up)
            if stage < self.stages - 1:
                actions.append(Action(Kind.RECV_GRAD, first + index))
            actions.append(Action(Kind.BACKWARD, first + index))
            if stage > 0:
                actions.append(Action(Kind.SEND_GRAD, first + index))
        actions.append(Action(Kind.UPDATE, first + self.accumulation - 1))
        return actions


SCHEDULES = {"async_1f1b": AsyncSchedule, "1f1b": FlushingSchedule}
"""By the name of `"pipeline": {"schedule": ...}`."""

Schedule = AsyncSchedule | FlushingSchedule

_SENDS = {Kind.SEND_ACTIVATION: (1, Kind.RECV_ACTIVATION), Kind.SEND_GRAD: (-1, Kind.RECV_GRAD)}
"""What is sent: to which neighbour, and what receives it there."""

_FORWARD, _BACKWARD = Kind.FORWARD, Kind.BACKWARD
_TIMED = {Kind.RECV_ACTIVATION, Kind.RECV_GRAD, Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, *_SENDS}


@dataclass(frozen=True)
class StageFigures:
    """One stage in the steady state; see `Timeline.figures`."""

    staleness_microbatches: float
    """Mean lateness in updates times microbatches per update."""
    staleness_updates: float
    """Updates that the stage made between the forward of a microbatch and the update that it goes into, mean."""
    bubble: float
    """Idle time / all time."""
    versions: int
    """Versions of the weights kept at once for backwards to come, at most; 0 where no update falls between a forward and its backward."""
    in_flight: int
    """Microbatches forwarded and not yet back-propagated at once, at most: so many activations are kept."""
    busy_ms: float
    """Work per microbatch."""
    ms_per_microbatch: float
    """Work and waits per microbatch."""


@dataclass(frozen=True)
class Figures:
    """A pipeline in the steady state, from call `first_call` on."""

    first_call: int
    period_ms: float
    """Time per microbatch: that of the stage where it is longest."""
    efficiency: float
    """Work of the slowest stage per microbatch / period: 1 where that stage never waits."""
    stages: tuple[StageFigures, ...]

    @property
    def slowest(self) -> int:
        """The stage with the most work per microbatch, the first of equals."""
        most = max(stage.busy_ms for stage in self.stages)
        return next(index for index, stage in enumerate(self.stages) if math.isclose(stage.busy_ms, most, rel_tol=1e-9))


@dataclass(frozen=True)
class Timeline:
    """A simulated run of `calls` calls of `train_batch()`: `lanes[stage]` are the spans of a stage in order of time."""

    schedule: Schedule
    lanes: list[list[Span]]
    calls: int

    @property
    def spans(self) -> Iterator[Span]:
        """All spans, stage after stage."""
        return chain.from_iterable(self.lanes)

    def first(self, calls: int) -> "Timeline":
        """The first `calls` calls alone."""
        if calls >= self.calls:
            return self
        ends = [[i for i, span in enumerate(lane) if span.kind == UPDATE][calls - 1] for lane in self.lanes]
        return Timeline(self.schedule, [lane[: end + 1] for lane, end in zip(self.lanes, ends)], calls)

    def figures(self, first_call: int) -> Figures:
        """What holds from call `first_call` (at least 1) to the last, all counted on the spans.

        Raises:
            ValueError: nothing comes after `first_call`.
        """
        if not 1 <= first_call < self.calls:
            raise ValueError(f"first_call: must be 1 to {self.calls - 1}, got {first_call}")
        stages = tuple(_stage_figures(lane, self.schedule.accumulation, first_call) for lane in self.lanes)
        period = max(stage.ms_per_microbatch for stage in stages)
        return Figures(first_call, period, max(stage.busy_ms for stage in stages) / period, stages)

    def format(self) -> str:
        """The run as text, for unit times without latency: one row per stage, one column for each forward or backward."""
        rows: list[dict[int, str]] = []
        for lane in self.lanes:
            updated = {span.microbatch for span in lane if span.kind == UPDATE}
            cells = {round(s.start_ms): f"{s.kind}{s.microbatch}" for s in lane if s.kind == FORWARD}
            cells |= {
                round(s.start_ms): f"{s.kind}{s.microbatch}{'*' if s.microbatch in updated else ''}" for s in lane if s.kind == BACKWARD
            }
            rows.append(cells)
        width = 2 + max(len(cell) for row in rows for cell in row.values())
        lines = [
            f"stage {stage:<3d}|" + "".join(f"{row.get(t, '.'):>{width}}" for t in range(max(row) + 1)) for stage, row in enumerate(rows)
        ]
        return "\n".join([*lines, "F forward, B backward, * update after this backward, . idle"])


def simulate(schedule: Schedule, times: Times, calls: int) -> Timeline:
    """Run `calls` calls of `schedule` on stages with these `times`.

    Each stage does its actions in order and has a clock of its own; it runs until it needs a message that is not sent yet, and again when
    that is. So every action is looked at once, whatever the number of stages.

    Raises:
        ValueError: `times` are for another number of stages, or the stages wait for each other for ever.
    """
    if len(times.forward_ms) != schedule.stages:
        raise ValueError(f"times: are for {len(times.forward_ms)} stages, the schedule has {schedule.stages}")
    if calls < 1:
        raise ValueError(f"calls: must be >= 1, got {calls}")
    stages = [_Stage(stage, schedule, times, calls) for stage in range(schedule.stages)]
    ready = deque(stages)
    while ready:
        ready.extend(ready.popleft().run(stages))
    stuck = {stage.index: stage.action for stage in stages if stage.action is not None}
    if stuck:
        raise ValueError(f"the stages wait for each other for ever: {stuck}")
    return Timeline(schedule, [stage.spans for stage in stages], calls)


class _Stage:
    """One stage of a simulation: its clock, the messages that reached it, and where it is in its actions."""

    def __init__(self, index: int, schedule: Schedule, times: Times, calls: int):
        self.index, self.clock, self.updates = index, 0.0, 0
        self.spans: list[Span] = []
        self.arrived: dict[Kind, dict[int, float]] = {kind: {} for kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRAD, Kind.UPDATE)}
        self._forward_ms, self._backward_ms, self._update_ms = times.forward_ms[index], times.backward_ms[index], times.update_ms[index]
        self._latency_ms = times.latency_ms
        self._flushes = isinstance(schedule, FlushingSchedule)
        self._versions: dict[int, int] = {}
        self._actions = _actions(schedule, index, calls)
        self.action = next(self._actions, None)

    def run(self, stages: "Sequence[_Stage]") -> "list[_Stage]":
        """Go on as far as possible; returns the stages that can go on because of it."""
        woken: list[_Stage] = []
        while self.action is not None:
            kind, microbatch = self.action
            if kind is _FORWARD:
                self._versions[microbatch] = self.updates
                self._work(FORWARD, microbatch, self.updates, self._forward_ms)
            elif kind is _BACKWARD:
                self._work(BACKWARD, microbatch, self._versions.pop(microbatch), self._backward_ms)
            elif kind in _SENDS:
                offset, receive = _SENDS[kind]
                receiver = stages[self.index + offset]
                receiver.arrived[receive][microbatch] = self.clock + self._latency_ms
                if receiver.action == (receive, microbatch):
                    woken.append(receiver)
            elif kind is Kind.UPDATE:
                if self._flushes and not self._meet(stages, microbatch, woken):
                    break
                self.updates += 1
                self._work(UPDATE, microbatch, self.updates, self._update_ms)
            elif not self._receive(kind, microbatch):
                break
            self.action = next(self._actions, None)
        return woken

    def _work(self, kind: str, microbatch: int, version: int, duration_ms: float) -> None:
        end = self.clock + duration_ms
        self.spans.append(Span(self.index, kind, microbatch, version, self.clock, end))
        self.clock = end

    def _receive(self, kind: Kind, microbatch: int) -> bool:
        at = self.arrived[kind].pop(microbatch, None)
        if at is None:
            return False
        if at > self.clock:
            self.spans.append(Span(self.index, WAIT, microbatch, self.updates, self.clock, at))
            self.clock = at
        return True

    def _meet(self, stages: "Sequence[_Stage]", microbatch: int, woken: "list[_Stage]") -> bool:
        """Whether all stages have come to this update; the last one to come lets them all go on."""
        meeting = (Kind.UPDATE, microbatch)
        if all(stage.action == meeting for stage in stages):
            latest = max(stage.clock for stage in stages)
            for stage in stages:
                stage.arrived[Kind.UPDATE][microbatch] = latest
            woken += [stage for stage in stages if stage is not self]
        return self._receive(*meeting)


def _actions(schedule: Schedule, stage: int, calls: int) -> Iterator[tuple[Kind, int]]:
    """(kind, microbatch) of what takes or may take time. A full pipeline does the same in every call, with later microbatches."""
    for t in range(calls):
        first = t * schedule.accumulation
        if t < 2:
            actions = [(a.kind, a.microbatch - first) for a in schedule.call(stage, first, t > 0) if a.kind in _TIMED]
        for kind, offset in actions:
            yield kind, first + offset


def steady_calls(schedule: Schedule) -> tuple[int, int]:
    """(calls after which the pipeline is in its steady state, calls to look at after these).

    Where messages are slow, microbatches come in groups of as many as there are stages, so whole groups are looked at unless that takes
    very long.
    """
    if isinstance(schedule, FlushingSchedule):
        return 1, 1
    fill = math.ceil(schedule.stages / schedule.accumulation)
    whole_groups = schedule.stages // math.gcd(schedule.stages, schedule.accumulation)
    return 2 * fill + 1, min(whole_groups, 8 * fill)


def _stage_figures(lane: Sequence[Span], accumulation: int, first_call: int) -> StageFigures:
    updates = versions = in_flight = late = 0
    needed, alive = False, Counter()  # microbatches in flight by their version
    busy, start, end = 0.0, 0.0, 0.0
    for span in lane:
        if span.kind == FORWARD:
            alive[span.version] += 1
            versions, in_flight = max(versions, len(alive)), max(in_flight, alive.total())
        elif span.kind == BACKWARD:
            alive[span.version] -= 1
            if not alive[span.version]:
                del alive[span.version]
            needed = needed or span.version != updates
            late += (updates - span.version) * (updates >= first_call)
        if updates >= first_call and span.kind != WAIT:
            busy += span.end_ms - span.start_ms
        if span.kind == UPDATE:
            updates, end = span.version, span.end_ms
            if updates == first_call:
                start = end
    microbatches = (updates - first_call) * accumulation
    staleness_updates = late / microbatches
    return StageFigures(
        staleness_microbatches=staleness_updates * accumulation,
        staleness_updates=staleness_updates,
        bubble=max(0.0, 1 - busy / (end - start)),
        versions=versions if needed else 0,
        in_flight=in_flight,
        busy_ms=busy / microbatches,
        ms_per_microbatch=(end - start) / microbatches,
    )
