"""The simulated pipeline keeps the pace, idles, lags and stashes as its schedule and times demand."""

import itertools
import math
import time

import pytest

from ds_basisrot.pipeline.schedule import AsyncSchedule, Kind, flatten, microbatch_staleness, microbatch_versions, per_stage_calls, validate
from ds_basisrot.pipeline.timeline import FlushingSchedule, Times, simulate, steady_calls

SIZES = [*itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 16)), (32, 1), (32, 5)]


def steady(schedule, times):
    settled, watched = steady_calls(schedule)
    return simulate(schedule, times, settled + watched).figures(settled)


@pytest.mark.parametrize("stages, accumulation", SIZES)
def test_equal_stages_without_latency_never_wait(stages, accumulation):
    figures = steady(AsyncSchedule(stages, accumulation), Times.of(stages, 1.0, 2.0, 0.6))
    assert figures.period_ms == pytest.approx(3 + 0.6 / accumulation)
    assert figures.efficiency == pytest.approx(1) and figures.slowest == 0
    assert all(stage.bubble == pytest.approx(0, abs=1e-9) for stage in figures.stages)


@pytest.mark.parametrize("stages, accumulation", SIZES)
@pytest.mark.parametrize("latency_ms", [0.1, 1.0, 7.0])
def test_latency_slows_the_circle_through_all_stages(stages, accumulation, latency_ms):
    # P microbatches go down and up again, through P forwards, P backwards and 2(P-1) messages, before the first stage may go on
    figures = steady(AsyncSchedule(stages, accumulation), Times.of(stages, latency_ms=latency_ms))
    assert figures.period_ms == pytest.approx(3 + 2 * (stages - 1) / stages * latency_ms)
    assert figures.efficiency == pytest.approx(3 / figures.period_ms)
    assert figures.stages[0].bubble == pytest.approx(1 - figures.efficiency)


@pytest.mark.parametrize("slow", [0, 3, 7])
def test_the_slowest_stage_sets_the_pace(slow):
    forward, backward = [1.0, 0.8] * 4, [2.0, 1.5] * 4
    forward[slow], backward[slow] = 1.7, 3.3
    figures = steady(AsyncSchedule(8, 2), Times.of(8, forward, backward))
    assert figures.period_ms == pytest.approx(5.0) and figures.efficiency == pytest.approx(1)
    assert figures.slowest == slow and figures.stages[slow].bubble == pytest.approx(0)
    other = 4
    assert figures.stages[other].bubble == pytest.approx(1 - 3 / 5)
    assert figures.stages[other].busy_ms == pytest.approx(3)


@pytest.mark.parametrize("stages, accumulation", SIZES)
def test_staleness_and_versions_follow_from_the_events(stages, accumulation):
    figures = steady(AsyncSchedule(stages, accumulation), Times.of(stages, latency_ms=0.3))
    for stage, each in enumerate(figures.stages):
        tau = stages - 1 - stage
        assert each.staleness_microbatches == pytest.approx(tau)
        assert each.staleness_updates == pytest.approx(tau / accumulation)
        assert each.versions == (math.ceil(tau / accumulation) + 1 if tau else 0)
        assert each.in_flight == tau + 1


def test_versions_and_order_are_those_of_the_schedule():
    schedule = AsyncSchedule(5, 2)
    run = simulate(schedule, Times.of(5, [1, 3, 1, 2, 1], 2.0, 0.5, 0.2), 9)
    for stage, lane in enumerate(run.lanes):
        actions = flatten(schedule.calls(stage, 9))
        work = [(s.kind, s.microbatch) for s in lane if s.kind != "wait"]
        assert work == [(a.kind.value, a.microbatch) for a in actions if a.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)]
        assert {s.microbatch: s.version for s in lane if s.kind == "B"} == microbatch_versions(actions)
        assert max(microbatch_staleness(actions).values()) == 4 - stage
        assert [s.version for s in lane if s.kind == "U"] == list(range(1, 10))


def test_spans_of_a_stage_touch_and_messages_take_their_time():
    run = simulate(AsyncSchedule(4), Times.of(4, 1.0, 2.0, 0.3, 0.7), 10)
    for lane in run.lanes:
        assert all(one.end_ms == two.start_ms for one, two in itertools.pairwise(lane))
    at = {(s.stage, s.kind, s.microbatch): s for s in run.spans if s.kind != "wait"}
    for (stage, kind, microbatch), span in at.items():
        if kind == "F" and stage > 0:
            assert span.start_ms >= at[stage - 1, "F", microbatch].end_ms + 0.7 - 1e-9
        if kind == "B" and stage < 3:
            assert span.start_ms >= at[stage + 1, "B", microbatch].end_ms + 0.7 - 1e-9


@pytest.mark.parametrize("stages, accumulation", SIZES)
def test_a_flush_costs_what_filling_and_draining_take(stages, accumulation):
    figures = steady(FlushingSchedule(stages, accumulation), Times.of(stages))
    assert figures.efficiency == pytest.approx(accumulation / (accumulation + stages - 1))
    for stage, each in enumerate(figures.stages):
        assert (each.staleness_microbatches, each.versions) == (0, 0)
        assert each.in_flight == min(stages - stage, accumulation)


def test_a_flush_makes_all_stages_wait_before_the_update():
    run = simulate(FlushingSchedule(3, 2), Times.of(3, 1.0, 2.0, [0.5, 1.0, 0.1]), 3)
    for version in (1, 2, 3):
        updates = [s for s in run.spans if s.kind == "U" and s.version == version]
        assert {s.start_ms for s in updates} == {max(s.end_ms for s in run.spans if s.kind == "B" and s.version == version - 1)}


@pytest.mark.parametrize("stages, accumulation", [(1, 2), (2, 2), (4, 3), (6, 1)])
def test_its_times_are_those_of_the_checked_schedule(stages, accumulation):
    schedule = AsyncSchedule(stages, accumulation)
    slots = {(stage, str(action)): slot for (stage, action), slot in validate(per_stage_calls(schedule, 3)).items()}
    spans = [s for s in simulate(schedule, Times.of(stages, 1.0, 1.0), 3).spans if s.kind in "FB"]
    assert {(s.stage, f"{s.kind}{s.microbatch}"): s.start_ms for s in spans} == slots


def test_its_text():
    assert simulate(AsyncSchedule(2, 2), Times.of(2, 1.0, 1.0), 2).format().splitlines() == [
        "stage 0  |   F0   F1    .   B0   F2  B1*   F3   B2   F4  B3*",
        "stage 1  |    .   F0   B0   F1  B1*   F2   B2   F3  B3*",
        "F forward, B backward, * update after this backward, . idle",
    ]


def test_the_text_of_a_flush():
    assert simulate(FlushingSchedule(2, 2), Times.of(2, 1.0, 1.0), 2).format().splitlines() == [
        "stage 0  |   F0   F1    .   B0    .  B1*   F2   F3    .   B2    .  B3*",
        "stage 1  |    .   F0   B0   F1  B1*    .    .   F2   B2   F3  B3*",
        "F forward, B backward, * update after this backward, . idle",
    ]


def test_the_first_calls_of_a_run_are_a_shorter_run():
    schedule, times = AsyncSchedule(4, 2), Times.of(4, latency_ms=0.3)
    assert simulate(schedule, times, 9).first(3) == simulate(schedule, times, 3)


def test_hundreds_of_stages_take_seconds():
    start = time.process_time()
    run = simulate(AsyncSchedule(256), Times.of(256), 345)  # 600 forwards of the first stage
    assert run.figures(300).period_ms == pytest.approx(3)
    assert time.process_time() - start < 10


def test_a_schedule_that_would_hang_is_refused():
    class GradientFirst(AsyncSchedule):
        def call(self, stage, first, filled):
            actions = super().call(stage, first, filled)
            return sorted(actions, key=lambda a: a.kind is not Kind.RECV_GRAD)

    with pytest.raises(ValueError, match="wait for each other"):
        simulate(GradientFirst(2), Times.of(2), 2)


@pytest.mark.parametrize(
    "times, message",
    [
        ({"forward_ms": [1, 2]}, "forward_ms: give one number, or one for each of the 4 stages, got 2"),
        ({"backward_ms": 0}, "backward_ms: must be finite and > 0, got 0"),
        ({"update_ms": -1}, "update_ms: must be finite and >= 0, got -1"),
        ({"latency_ms": math.inf}, "latency_ms: must be finite"),
    ],
)
def test_impossible_times_are_refused(times, message):
    with pytest.raises(ValueError, match=message):
        Times.of(4, **times)


def test_other_impossible_wishes_are_refused():
    with pytest.raises(ValueError, match="times: are for 3 stages, the schedule has 4"):
        simulate(AsyncSchedule(4), Times.of(3), 2)
    with pytest.raises(ValueError, match="calls: must be >= 1"):
        simulate(AsyncSchedule(4), Times.of(4), 0)
    with pytest.raises(ValueError, match="first_call: must be 1 to 1"):
        simulate(AsyncSchedule(4), Times.of(4), 2).figures(2)
    with pytest.raises(ValueError, match="must be >= 1"):
        FlushingSchedule(0)
