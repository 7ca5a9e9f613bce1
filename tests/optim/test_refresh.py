"""When matrices are refreshed: how stages share the cost, how a stage spreads it over its updates, and what the optimizer makes of both."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_basisrot import BasisRotation
from ds_basisrot.optim import refresh
from ds_basisrot.optim.rotated_adam import StackUpdate

PERIODS = st.integers(1, 40)
RATES = st.one_of(PERIODS.map(lambda t: Fraction(1, t)), st.fractions(Fraction(1, 40), 1, max_denominator=10**6))
MATRIX_COSTS = st.lists(st.integers(1, 1000), min_size=1, max_size=40)
ALLOCATIONS = pytest.mark.parametrize("allocation", refresh.ALLOCATIONS)


@st.composite
def pipelines(draw):
    """Staleness in updates and cost of every stage; some stages have no matrices."""
    stages = draw(st.integers(1, 12))
    accumulation = draw(st.sampled_from([1, 2, 3, 8]))
    costs = draw(st.lists(st.one_of(st.just(0), st.integers(1, 10**15)), min_size=stages, max_size=stages))
    return [(stages - 1 - k) / accumulation for k in range(stages)], costs


def cost_per_update(rates, costs):
    return sum(rate * cost for rate, cost in zip(rates, costs))


def due_updates(rate, offset, first, last):
    return [t for t in range(first, last + 1) if refresh.is_due(t, rate, offset)]


def loads(costs, rate, offsets, updates):
    """What the refreshes of each of `updates` updates cost, from update 2 on."""
    return [sum(c for c, offset in zip(costs, offsets) if refresh.is_due(t, rate, offset)) for t in range(2, updates + 2)]


@ALLOCATIONS
@given(period=PERIODS, pipeline=pipelines())
def test_every_allocation_costs_exactly_what_the_uniform_one_costs(allocation, period, pipeline):
    staleness, costs = pipeline
    rates = refresh.rates(allocation, period, staleness, costs)
    assert cost_per_update(rates, costs) == Fraction(sum(costs), period)
    assert all(0 < rate <= 1 for rate in rates)


@given(period=PERIODS, pipeline=pipelines())
def test_rates_are_in_proportion_to_one_plus_the_staleness_up_to_one_refresh_an_update(period, pipeline):
    staleness, costs = pipeline
    for allocation, weight in (("stage_aware", lambda tau: 1 + tau), ("inverse", lambda tau: 1 / (1 + tau))):
        rates = refresh.rates(allocation, period, staleness, costs)
        unit = [rate / weight(Fraction(tau).limit_denominator(100)) for rate, tau, cost in zip(rates, staleness, costs) if 0 < cost]
        below = [u for u, rate in zip(unit, (rate for rate, cost in zip(rates, costs) if cost)) if rate < 1]
        assert len(set(below)) <= 1
        assert all(u <= min(below) for u in unit) if below else True  # a stage at the limit got no more than its proportion


def test_a_pipeline_of_eight_stages_by_hand():
    rates = refresh.rates("stage_aware", 10, [7, 6, 5, 4, 3, 2, 1, 0], [1] * 8)
    assert rates == [Fraction(w, 45) for w in (8, 7, 6, 5, 4, 3, 2, 1)]
    assert refresh.rates("inverse", 10, [1, 0], [1, 1]) == [Fraction(1, 15), Fraction(2, 15)]
    assert refresh.rates("uniform", 10, [1, 0], [5, 1]) == [Fraction(1, 10)] * 2


def test_a_dear_stage_is_charged_for_its_matrices():
    cheap, dear = refresh.rates("stage_aware", 10, [1, 0], [1, 3])
    assert cheap == 2 * dear and cheap + 3 * dear == Fraction(4, 10)


def test_what_a_stage_cannot_spend_goes_to_the_others_in_proportion():
    assert refresh.rates("stage_aware", 2, [8, 1, 0], [1, 1, 1]) == [1, Fraction(1, 3), Fraction(1, 6)]


@ALLOCATIONS
def test_a_period_of_one_refreshes_everything_at_every_update(allocation):
    assert refresh.rates(allocation, 1, [3, 2, 1, 0], [5, 1, 0, 2]) == [1, 1, 1, 1]
    assert refresh.offsets([3, 1, 2], Fraction(1)) == [0, 0, 0]
    assert due_updates(Fraction(1), 0, 1, 6) == [2, 3, 4, 5, 6]


@ALLOCATIONS
def test_without_late_gradients_every_allocation_is_uniform(allocation):
    assert refresh.rates(allocation, 7, [0, 0, 0], [1, 2, 0]) == [Fraction(1, 7)] * 3
    assert refresh.rates(allocation, 7, [2, 1], [0, 0]) == [Fraction(1, 7)] * 2


@given(rate=RATES, offset=st.integers(0, 40), first=st.integers(2, 1000), count=st.integers(1, 500))
def test_the_number_of_refreshes_is_the_rate_times_the_updates_within_one(rate, offset, first, count):
    due = due_updates(rate, offset, first, first + count - 1)
    assert abs(len(due) - rate * count) < 1
    assert all(math.floor(1 / rate) <= b - a <= math.ceil(1 / rate) for a, b in zip(due, due[1:]))


@given(period=PERIODS, offset=st.integers(0, 40), update=st.integers(2, 10**6))
def test_the_uniform_allocation_refreshes_once_a_period(period, offset, update):
    assert refresh.is_due(update, Fraction(1, period), offset) == ((update + offset) % period == 0)


def test_the_first_update_is_the_cold_start_and_no_refresh():
    assert not any(refresh.is_due(1, Fraction(1, period), offset) for period in (1, 2, 3) for offset in range(3))


@given(period=PERIODS, costs=MATRIX_COSTS)
def test_the_updates_of_a_period_differ_by_at_most_the_dearest_matrix(period, costs):
    each = loads(costs, Fraction(1, period), refresh.offsets(costs, Fraction(1, period)), period)
    assert sum(each) == sum(costs) and max(each) - min(each) <= max(costs)


@settings(deadline=None)
@given(rate=RATES, costs=MATRIX_COSTS)
def test_the_dearest_update_is_near_the_mean_at_any_rate(rate, costs):
    """Off the rates 1 / T, two slots of a cycle may meet, now and then."""
    cycle = max(refresh.LONGEST_CYCLE, math.ceil(1 / rate))
    each = loads(costs, rate, refresh.offsets(costs, rate), 400)
    assert max(each) <= rate * sum(costs) + 2 * max(costs) + 2 * sum(costs) / Fraction(cycle)


@pytest.mark.parametrize(
    "rate", [Fraction(8, 15), Fraction(49, 100), Fraction(51, 100), Fraction(2, 21), Fraction(4, 45), Fraction(66, 100)]
)
def test_a_model_s_refreshes_are_spread_at_rates_that_are_no_whole_period(rate):
    costs = 12 * [1, 1, 1, 1, 5, 5]
    assert max(loads(costs, rate, refresh.offsets(costs, rate), 400)) < 1.2 * rate * sum(costs)


@given(rate=RATES, costs=MATRIX_COSTS)
def test_offsets_depend_on_nothing_but_costs_and_rate(rate, costs):
    assert refresh.offsets(costs, rate) == refresh.offsets(list(costs), Fraction(rate))


@given(period=PERIODS, costs=MATRIX_COSTS)
def test_no_two_matrices_share_an_update_where_there_are_updates_enough(period, costs):
    costs = costs[:period]
    offsets = refresh.offsets(costs, Fraction(1, period))
    assert len(set(offsets)) == len(costs) and all(0 <= offset < period for offset in offsets)


# -- the optimizer -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def refreshed(monkeypatch):
    """(update, parameter) of every refresh that follows."""
    seen, original = [], StackUpdate.refresh

    def recording(self, *args, **kwargs):
        seen.append((self.state["step"], id(self.state)))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(StackUpdate, "refresh", recording)
    return seen


def train(optimizer, updates, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def count(refreshed, optimizer, parameters):
    states = {id(optimizer.state[p]) for p in parameters}
    return sum(state in states for _, state in refreshed)


@pytest.mark.parametrize("allocation, expected", [("uniform", [15, 15]), ("stage_aware", [20, 10]), ("inverse", [10, 20])])
def test_a_plain_loop_names_the_staleness_of_each_group(refreshed, allocation, expected):
    stages = [[nn.Parameter(torch.randn(3, 4)) for _ in range(2)] for _ in range(2)]
    groups = [{"params": parameters, "staleness": 1 - k} for k, parameters in enumerate(stages)]
    optimizer = BasisRotation(groups, refresh_period=4, refresh_allocation=allocation)
    train(optimizer, 61)
    for parameters, number in zip(stages, expected):
        assert abs(count(refreshed, optimizer, parameters) - 2 * number) <= 2  # within one for each matrix


def test_the_stages_one_optimizer_is_told_of_win_over_its_groups(refreshed):
    parameters = [nn.Parameter(torch.randn(3, 4)) for _ in range(2)]
    optimizer = BasisRotation(parameters, refresh_period=4, refresh_allocation="stage_aware")
    optimizer.share_refreshes([1, 0], [optimizer.refresh_cost()] * 2, 1)
    train(optimizer, 61)
    assert abs(count(refreshed, optimizer, parameters) - 2 * 10) <= 2


def test_a_refresh_costs_what_its_shapes_say():
    square, wide = (BasisRotation([nn.Parameter(torch.randn(shape))]) for shape in ((8, 8), (8, 16)))
    assert 0 < square.refresh_cost() < wide.refresh_cost()
    assert BasisRotation([nn.Parameter(torch.randn(8, 8))], max_dim=4).refresh_cost() == 0


def test_resuming_does_not_change_when_a_matrix_is_refreshed(refreshed):
    def optimizer(parameters):
        made = BasisRotation(parameters, refresh_period=4, refresh_allocation="stage_aware")
        made.share_refreshes([2.5, 0], [made.refresh_cost(), 1000], 0)
        return made

    ours = [nn.Parameter(torch.randn(3, 4 + i)) for i in range(3)]
    one = optimizer(ours)
    train(one, 7)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    other = optimizer(theirs)
    other.load_state_dict(one.state_dict())
    timetables = []
    for each, parameters in ((one, ours), (other, theirs)):
        refreshed.clear()
        train(each, 20, seed=1)
        order = {id(each.state[p]): i for i, p in enumerate(parameters)}
        timetables.append([(update, order[state]) for update, state in refreshed])
    assert timetables[0] == timetables[1] and len(timetables[0]) > 5
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
