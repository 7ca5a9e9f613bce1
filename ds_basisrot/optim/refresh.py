"""When each matrix gets a new basis: the rate of its pipeline stage, and its place in the period, such that all updates cost the same."""

import math
from collections.abc import Sequence
from fractions import Fraction

ALLOCATIONS = ("uniform", "stage_aware", "inverse")

# Updates after which the refreshes of a rate that is no 1 / T are taken to repeat, where they are spread.
LONGEST_CYCLE = 64


def rates(allocation: str, period: int, staleness: Sequence[float], costs: Sequence[float]) -> list[Fraction]:
    """Refreshes per update and matrix for each pipeline stage; the cost of all stages together is that of 1 / `period` everywhere.

    Ours (the paper gives no map): stage k's rate is proportional to w_k = 1 + tau_k ("stage_aware"), the "1 +" because the last stage,
    which is never late, needs refreshes too; to 1 / (1 + tau_k) ("inverse"); or is the same for all ("uniform"):

        r_k = w_k / period * sum_j c_j / sum_j c_j w_j

    No matrix can be refreshed more than once per update: what a stage would spend beyond that goes to the others in the same proportions.

    Args:
        allocation: one of `ALLOCATIONS`.
        period: updates between refreshes in the uniform allocation.
        staleness: tau_k of each stage, in updates.
        costs: c_k, what refreshing all matrices of the stage once costs, in any unit. Stages without matrices have cost 0.
    """
    exact = [Fraction(tau).limit_denominator(1 << 20) for tau in staleness]
    weights = {
        "uniform": [Fraction(1)] * len(exact),
        "stage_aware": [1 + tau for tau in exact],
        "inverse": [1 / (1 + tau) for tau in exact],
    }
    weights, costs = weights[allocation], [Fraction(cost) for cost in costs]
    budget = sum(costs) / period
    result: list[Fraction] = [Fraction(1)] * len(exact)
    open_stages = [k for k, cost in enumerate(costs) if cost > 0]
    for idle in set(range(len(exact))) - set(open_stages):
        result[idle] = Fraction(1, period)
    while open_stages:
        unit = budget / sum(costs[k] * weights[k] for k in open_stages)
        saturated = [k for k in open_stages if unit * weights[k] >= 1]
        if not saturated:
            for k in open_stages:
                result[k] = unit * weights[k]
            break
        budget -= sum(costs[k] for k in saturated)
        open_stages = [k for k in open_stages if k not in saturated]
    return result


def describe_share(allocation: str, period: int, staleness: Sequence[float], costs: Sequence[float], stage: int) -> str:
    """In words, how often the matrices of one stage are refreshed, and what part of all refreshing that is; arguments as of `rates`."""
    rate = rates(allocation, period, staleness, costs)[stage]
    part = rate * Fraction(costs[stage]) / sum(map(Fraction, costs)) * period
    return f"refreshes every {float(1 / rate):.3g} updates (uniform: {period}), share of the budget {float(part):.0%}"


def offsets(costs: Sequence[float], rate: Fraction) -> list[int]:
    """Offsets of matrices in updates, such that their refreshes' costs are spread evenly: the dearest first, each where the load is least.

    At a rate of 1 / T the loads of the updates differ by at most the dearest matrix. The refreshes of other rates do not repeat after one
    period; loads are then balanced over a cycle of a nearby rate, within about the same, instead of meeting in some updates twice as high.
    """
    cycle = rate.limit_denominator(max(LONGEST_CYCLE, math.ceil(1 / rate)))
    updates = range(cycle.denominator)
    first = [t for t in updates if is_due(t + 2, cycle, 0)]
    due = [[(t - offset) % len(updates) for t in first] for offset in updates]
    load: list[float] = [0] * len(updates)
    result = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        loads = [[load[t] for t in when] for when in due]
        result[index] = min(updates, key=lambda offset: (max(loads[offset]), sum(loads[offset]), offset))
        for t in due[result[index]]:
            load[t] += costs[index]
    return result


def is_due(update: int, rate: Fraction, offset: int) -> bool:
    """True when a matrix is refreshed at this `update` (1-based). Update 1 is the cold start, which is not a refresh."""
    if update <= 1:
        return False
    refreshes, updates = rate.as_integer_ratio()
    return (update + offset) * refreshes // updates > (update - 1 + offset) * refreshes // updates
