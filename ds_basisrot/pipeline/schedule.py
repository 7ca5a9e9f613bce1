"""The no-flush 1F1B schedule as data: the actions of every stage, validated, with its staleness computed from them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a stage does. A receive is posted (non-blocking), later waited for; sends never block."""

    POST_ACTIVATION = "pa"
    RECV_ACTIVATION = "ra"
    FORWARD = "F"
    SEND_ACTIVATION = "sa"
    POST_GRAD = "pg"
    RECV_GRAD = "rg"
    BACKWARD = "B"
    SEND_GRAD = "sg"
    UPDATE = "U"


@dataclass(frozen=True)
class Action:
    """One action on one microbatch (0-based, counted from the start of training); an UPDATE names its last microbatch."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


class ScheduleError(ValueError):
    """A schedule that would train something else than it says, or hang."""


def staleness(stage: int, stages: int) -> int:
    """tau_k = P - 1 - k: microbatches whose gradients a stage applies between forward and backward of one microbatch."""
    return stages - 1 - stage


def forward_version(microbatch: int, tau: int, accumulation: int, cut: int = 0) -> int:
    """Updates that a stage of staleness `tau` has made when it forwards `microbatch`: floor(max(cut, microbatch - tau) / accumulation).

    `cut` is the microbatch at which the pipeline was last filled (0, or where a checkpoint was cut).
    """
    return max(cut, microbatch - tau) // accumulation


class AsyncSchedule:
    """No-flush 1F1B (PipeDream): every stage alternates one forward and one backward for ever and updates after `accumulation` backwards.

    One call of `train_batch()` runs `accumulation` backwards and one update on every stage. Between calls a stage of staleness tau has tau
    microbatches in flight, as forwards only, and every message that was sent has had its receive posted in the same call.

    Args:
        stages: pipeline stages P.
        accumulation: microbatches per update (gradient_accumulation_steps).
    """

    def __init__(self, stages: int, accumulation: int = 1):
        if stages < 1 or accumulation < 1:
            raise ScheduleError(f"stages and accumulation: must be >= 1, got {stages} and {accumulation}")
        self.stages, self.accumulation = stages, accumulation

    def call(self, stage: int, first: int, filled: bool) -> list[Action]:
        """Actions of `stage` in the call that trains microbatches `first` .. `first + accumulation - 1`.

        Args:
            stage: 0-based.
            first: first microbatch whose backward belongs to this call.
            filled: whether the pipeline is full; False for the first call and after a cut, which fill it.
        """
        if not 0 <= stage < self.stages:
            raise ScheduleError(f"stage: must be 0 to {self.stages - 1}, got {stage}")
        tau, end = staleness(stage, self.stages), first + self.accumulation
        actions: list[Action] = []

        def do(kind: Kind, microbatch: int) -> None:
            actions.append(Action(kind, microbatch))

        def forward(microbatch: int) -> None:
            if stage > 0:
                do(Kind.RECV_ACTIVATION, microbatch)
                do(Kind.POST_ACTIVATION, microbatch + 1)
            do(Kind.FORWARD, microbatch)
            if stage < self.stages - 1:
                do(Kind.SEND_ACTIVATION, microbatch)

        has_next = stage < self.stages - 1
        if not filled and stage > 0:
            do(Kind.POST_ACTIVATION, first)
        if not filled:
            for microbatch in range(first, first + tau):
                forward(microbatch)
        if has_next:
            do(Kind.POST_GRAD, first)  # after the first forwards, whose shapes the gradients have
        for microbatch in range(first, end):
            forward(microbatch + tau)
            if has_next:
                do(Kind.RECV_GRAD, microbatch)
                if microbatch + 1 < end:
                    do(Kind.POST_GRAD, microbatch + 1)
            do(Kind.BACKWARD, microbatch)
            if stage > 0:
                do(Kind.SEND_GRAD, microbatch)
        do(Kind.UPDATE, end - 1)
        return actions

    def calls(self, stage: int, calls: int, cuts: Sequence[int] = ()) -> list[list[Action]]:
        """Actions of `stage` in calls 0 .. calls - 1; `cuts` are the calls before which the pipeline is cut."""
        return [self.call(stage, t * self.accumulation, filled=t > 0 and t not in cuts) for t in range(calls)]

    def staleness(self, stage: int) -> int:
        """Staleness of `stage` in microbatches once the pipeline is full, counted on the actions themselves."""
        counts = microbatch_staleness(flatten(self.calls(stage, 2 * self.stages // self.accumulation + 2)))
        return max(counts.values())


def flatten(calls: list[list[Action]]) -> list[Action]:
    """The actions of several calls in one list."""
    return [action for call in calls for action in call]


def per_stage_calls(schedule: AsyncSchedule, calls: int, cuts: Sequence[int] = ()) -> list[list[list[Action]]]:
    """Actions `[stage][call][position]` of a whole run."""
    return [schedule.calls(stage, calls, cuts) for stage in range(schedule.stages)]


def microbatch_staleness(actions: Sequence[Action]) -> dict[int, int]:
    """For each microbatch with a backward: how many other backwards its stage ran between that microbatch's forward and its backward."""
    backwards, at_forward, counts = 0, {}, {}
    for action in actions:
        if action.kind is Kind.FORWARD:
            at_forward[action.microbatch] = backwards
        elif action.kind is Kind.BACKWARD:
            counts[action.microbatch] = backwards - at_forward[action.microbatch]
            backwards += 1
    return counts


def microbatch_versions(actions: Sequence[Action]) -> dict[int, int]:
    """For each microbatch with a backward: how many updates its stage had made when it forwarded it (the last forward, after a cut)."""
    updates, versions, done = 0, {}, set()
    for action in actions:
        if action.kind is Kind.FORWARD:
            versions[action.microbatch] = updates
        elif action.kind is Kind.BACKWARD:
            done.add(action.microbatch)
        elif action.kind is Kind.UPDATE:
            updates += 1
    return {microbatch: versions[microbatch] for microbatch in sorted(done)}


def validate(runs: list[list[list[Action]]]) -> dict[tuple[int, Action], int]:
    """Check a run `[stage][call][position]` without cuts, and time it with unit forwards and backwards.

    Checks that every stage trains the same microbatches once and in order, that every message is received by the neighbour in the order it
    was sent with its receive posted in the call that sends it, and that the stages, run together, never wait for each other in a circle.

    Returns:
        The time slot of every (stage, FORWARD or BACKWARD action).

    Raises:
        ScheduleError: naming the stage and the action at fault.
    """
    for stage, calls in enumerate(runs):
        _check_stage(stage, calls)
        if stage > 0:
            _check_messages(stage - 1, runs[stage - 1], calls, Kind.SEND_ACTIVATION, Kind.POST_ACTIVATION, Kind.RECV_ACTIVATION)
        if stage < len(runs) - 1:
            _check_messages(stage + 1, runs[stage + 1], calls, Kind.SEND_GRAD, Kind.POST_GRAD, Kind.RECV_GRAD)
    return _run_together(runs)


def _check_stage(stage: int, calls: list[list[Action]]) -> None:
    forwarded, expected = set(), 0
    for call in calls:
        for action in call:
            if action.kind is Kind.FORWARD:
                if action.microbatch != len(forwarded):
                    raise ScheduleError(f"stage {stage}: {action} out of order, microbatch {len(forwarded)} was due")
                forwarded.add(action.microbatch)
            elif action.kind is Kind.BACKWARD:
                if action.microbatch != expected or action.microbatch not in forwarded:
                    raise ScheduleError(f"stage {stage}: {action} out of order, microbatch {expected} was due and must be forwarded first")
                expected += 1
        if [a.microbatch for a in call if a.kind is Kind.UPDATE] != [expected - 1]:
            raise ScheduleError(f"stage {stage}: each call must make one update, after its last backward")


def _check_messages(sender: int, sends: list[list[Action]], receives: list[list[Action]], send: Kind, post: Kind, receive: Kind) -> None:
    sent = [(a.microbatch, t) for t, call in enumerate(sends) for a in call if a.kind is send]
    posted = [(a.microbatch, t) for t, call in enumerate(receives) for a in call if a.kind is post]
    if sent != posted:
        raise ScheduleError(f"{send.name} of stage {sender}: sent (microbatch, call) {sent}, receives posted {posted}: must be equal")
    received = [a.microbatch for call in receives for a in call if a.kind is receive]
    if received != [m for m, _ in posted][: len(received)]:
        raise ScheduleError(f"{receive.name} from stage {sender}: waited for {received}, posted {[m for m, _ in posted]}")


def _run_together(runs: list[list[list[Action]]]) -> dict[tuple[int, Action], int]:
    queues = [deque(flatten(calls)) for calls in runs]
    clocks, slots, arrived = [0] * len(runs), {}, {}
    waits = {Kind.RECV_ACTIVATION: (-1, Kind.SEND_ACTIVATION), Kind.RECV_GRAD: (1, Kind.SEND_GRAD)}
    moved = True
    while moved:
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                action = queue[0]
                if action.kind in waits:
                    offset, send = waits[action.kind]
                    sent_at = arrived.get((stage + offset, Action(send, action.microbatch)))
                    if sent_at is None:
                        break
                    clocks[stage] = max(clocks[stage], sent_at)
                elif action.kind in (Kind.FORWARD, Kind.BACKWARD):
                    slots[stage, action] = clocks[stage]
                    clocks[stage] += 1
                elif action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRAD):
                    arrived[stage, action] = clocks[stage]
                queue.popleft()
                moved = True
    stuck = {stage: str(queue[0]) for stage, queue in enumerate(queues) if queue}
    if stuck:
        raise ScheduleError(f"the stages wait for each other for ever: {stuck}")
    return slots
