"""The learning rate: linear warm-up, cosine to a tenth, a function of the update's number alone."""

from types import SimpleNamespace

import pytest
from lr_schedule import WarmupCosine


def optimizer(*peaks):
    return SimpleNamespace(param_groups=[{"lr": peak} for peak in peaks])


def rates(schedule, optimizer, updates):
    made = []
    for _ in range(updates):
        made.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return made


def test_it_rises_to_the_peak_and_falls_to_a_tenth():
    one = optimizer(2.0)
    made = rates(WarmupCosine(one, warmup_updates=4, total_updates=104), one, 105)
    assert made[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert made[54] == pytest.approx(2.0 * 0.55)
    assert made[104] == pytest.approx(0.2)
    assert made[4:] == sorted(made[4:], reverse=True)


def test_every_group_keeps_its_own_peak():
    two = optimizer(2.0, 1.0)
    WarmupCosine(two, warmup_updates=4, total_updates=8)
    assert [group["lr"] for group in two.param_groups] == [0.5, 0.25]


def test_a_resumed_schedule_follows_the_flags_given_now():
    first = optimizer(1.0)
    saved = WarmupCosine(first, warmup_updates=0, total_updates=10)
    rates(saved, first, 10)
    longer, whole = optimizer(1.0), optimizer(1.0)
    resumed = WarmupCosine(longer, warmup_updates=0, total_updates=40)
    resumed.load_state_dict(saved.state_dict())
    expected = rates(WarmupCosine(whole, warmup_updates=0, total_updates=40), whole, 40)
    assert rates(resumed, longer, 30) == expected[10:]
