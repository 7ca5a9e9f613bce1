"""The no-flush schedule: complete, in order, free of deadlock, as stale as it says."""

import itertools

import pytest

from ds_basisrot.pipeline.schedule import (
    Action,
    AsyncSchedule,
    Kind,
    ScheduleError,
    flatten,
    forward_version,
    microbatch_staleness,
    microbatch_versions,
    per_stage_calls,
    validate,
)

SIZES = [*itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 16)), (32, 1), (32, 4)]


@pytest.mark.parametrize("stages, accumulation", SIZES)
def test_it_is_valid(stages, accumulation):
    validate(per_stage_calls(AsyncSchedule(stages, accumulation), calls=5))


@pytest.mark.parametrize("stages, accumulation", SIZES)
def test_staleness_is_the_number_of_later_stages(stages, accumulation):
    schedule = AsyncSchedule(stages, accumulation)
    assert [schedule.staleness(k) for k in range(stages)] == list(range(stages - 1, -1, -1))


def test_staleness_is_counted_and_not_assumed():
    class OneForwardLess(AsyncSchedule):
        def call(self, stage, first, filled):
            return super().call(min(stage + 1, self.stages - 1), first, filled)

    assert [OneForwardLess(4, 2).staleness(k) for k in range(4)] == [2, 1, 0, 0]


@pytest.mark.parametrize("stages, accumulation", SIZES)
@pytest.mark.parametrize("cuts", [(), (2,), (1, 4)])
def test_versions_follow_the_rule_also_after_cuts(stages, accumulation, cuts):
    schedule = AsyncSchedule(stages, accumulation)
    for stage in range(stages):
        versions = microbatch_versions(flatten(schedule.calls(stage, 7, cuts)))
        assert list(versions) == list(range(7 * accumulation))
        for microbatch, version in versions.items():
            cut = max((c * accumulation for c in cuts if c * accumulation <= microbatch), default=0)
            assert version == forward_version(microbatch, stages - 1 - stage, accumulation, cut)


def test_between_calls_only_forwards_are_in_flight():
    schedule = AsyncSchedule(4, 2)
    for stage in range(4):
        for t, call in enumerate(schedule.calls(stage, 5)):
            actions = flatten(schedule.calls(stage, t + 1))
            forwarded = {a.microbatch for a in actions if a.kind is Kind.FORWARD}
            trained = {a.microbatch for a in actions if a.kind is Kind.BACKWARD}
            assert len(forwarded - trained) == 3 - stage
            assert [a.kind for a in call].count(Kind.UPDATE) == 1 and call[-1].kind is Kind.UPDATE


def test_no_stage_waits_once_the_pipeline_is_full():
    slots = validate(per_stage_calls(AsyncSchedule(6, 1), calls=20))
    for stage in range(6):
        busy = {slot for (s, _), slot in slots.items() if s == stage}
        assert busy >= set(range(12, 30))


def broken(change):
    runs = per_stage_calls(AsyncSchedule(3, 1), calls=4)
    change(runs)
    return runs


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda runs: runs[0][2].remove(Action(Kind.FORWARD, 4)), "stage 0: F5 out of order"),
        (lambda runs: runs[1][0].remove(Action(Kind.BACKWARD, 0)), "stage 1: each call must make one update"),
        (lambda runs: runs[2][1].remove(Action(Kind.POST_ACTIVATION, 2)), "SEND_ACTIVATION of stage 1"),
        (lambda runs: runs[1][3].insert(0, runs[1][2].pop(0)), "must be equal|waited for"),
        (lambda runs: runs[1][1].remove(Action(Kind.SEND_GRAD, 1)), "SEND_GRAD of stage 1"),
        (lambda runs: runs[0][0].insert(0, runs[0][0].pop(runs[0][0].index(Action(Kind.RECV_GRAD, 0)))), "wait for each other"),
    ],
)
def test_a_broken_schedule_is_refused(change, message):
    with pytest.raises(ScheduleError, match=message):
        validate(broken(change))


def test_staleness_counts_backwards_in_between():
    actions = [Action(kind, m) for kind, m in ((Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD, 0), (Kind.BACKWARD, 1))]
    assert microbatch_staleness(actions) == {0: 0, 1: 1}


@pytest.mark.parametrize("ask", [lambda s: s.staleness(4), lambda s: s.call(-1, 0, True)])
def test_what_is_not_there_is_refused(ask):
    with pytest.raises(ScheduleError, match="must be"):
        ask(AsyncSchedule(4, 2))


@pytest.mark.parametrize("stages, accumulation", [(0, 1), (2, 0)])
def test_sizes_must_be_positive(stages, accumulation):
    with pytest.raises(ScheduleError, match="must be >= 1"):
        AsyncSchedule(stages, accumulation)
