"""Slices reach their owners and come back, in few messages; with 1, 2 and 4 real processes."""

from collections import Counter

import exchange_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_shapes import MODELS, units_in

from ds_basisrot.sharding.exchange import MESSAGE_NUMEL, Exchange, messages
from ds_basisrot.sharding.layouts import LAYOUTS
from ds_basisrot.sharding.ownership import assign
from ds_basisrot.sharding.units import Unit

CASES = (
    "random_units", "one_owner", "empty_ranks", "what_stays", "some_stay", "stacks", "several_under_way", "strange_defaults",
)  # fmt: skip


@pytest.fixture(scope="module", params=(1, 2, 4))
def job(request, tmp_path_factory):
    """(ranks, what each rank saw by case) of a job in which every case passed on every rank."""
    folder = tmp_path_factory.mktemp(f"exchange{request.param}")
    torch.multiprocessing.spawn(exchange_cases.run_all, (request.param, str(folder), CASES), nprocs=request.param)
    return request.param, torch.load(folder / "seen.pt")


def test_slices_reach_their_owners_and_come_back(job):
    ranks, seen = job
    assert [set(own) for own in seen] == [set(CASES)] * ranks


def test_all_units_of_a_message_go_in_one_all_to_all_each_way(job):
    ranks, seen = job
    for own in seen:
        assert own["some_stay"] == own["empty_ranks"] == own["stacks"] == (0 if ranks == 1 else 2)
        assert set(own["random_units"]) <= {0, 2}
        assert own["several_under_way"] == (0 if ranks == 1 else seen[0]["several_under_way"])


def test_what_stays_needs_no_message(job):
    assert all(own["what_stays"] == 0 for own in job[1])


def test_one_process_without_a_group_exchanges_nothing():
    unit = Unit("m", (2, 3), None, LAYOUTS[1]([6], 1)[0])
    exchange = Exchange([unit], None, torch.device("cpu"))
    assert exchange.gather({}).wait() == exchange.scatter({}).wait() == {}
    assert messages([unit]) == []


def model_messages(model, stage, ranks, numel=None):
    units = units_in(MODELS[model](), stage, ranks)
    for unit, owner in zip(units, assign([unit.load("float32") for unit in units], ranks).owners):
        unit.owner = owner
    return units, messages(units, numel)


@pytest.mark.parametrize("ranks", (2, 8, 64))
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("model", MODELS)
def test_messages_are_few_and_large(model, stage, ranks):
    units, groups = model_messages(model, stage, ranks)
    most = max([sum(unit.moving for unit in units if unit.owner == rank) for rank in range(ranks)], default=0)
    limit = max([MESSAGE_NUMEL, *(unit.numel for unit in units)])
    assert -(-most // limit) <= len(groups) <= 1 + 2 * most // limit


def test_owners_have_work_in_every_message():
    units, groups = model_messages("llama", 3, 8)
    assert len(groups) > 10
    for group in groups[:-3]:
        assert {unit.owner for unit in group} == set(range(8))


@st.composite
def owned_units(draw):
    ranks, stage = draw(st.integers(1, 5)), draw(st.sampled_from((1, 3)))
    numels = draw(st.lists(st.integers(1, 60), max_size=15))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=len(numels), max_size=len(numels)))
    return [
        Unit(f"m{index}", (numel,), None, pieces, owner)
        for index, (numel, pieces, owner) in enumerate(zip(numels, LAYOUTS[stage](numels, ranks), owners))
    ]


@given(owned_units(), st.integers(1, 100))
@settings(deadline=None)
def test_messages_have_every_moving_unit_once_and_are_not_too_large(units, numel):
    groups = messages(units, numel)
    assert sorted(unit.name for group in groups for unit in group) == sorted(unit.name for unit in units if not unit.stays)
    limit = max([numel, *(unit.numel for unit in units if not unit.stays)])
    for group in groups:
        assert group
        to, since = Counter(), Counter()
        for unit in group:
            to[unit.owner] += unit.moving
            since.update({piece.rank: piece.numel for piece in unit.pieces if piece.rank != unit.owner})
        assert max([*to.values(), *since.values()]) <= limit
    for owner in range(5):  # in the order given
        names = [int(unit.name[1:]) for group in groups for unit in group if unit.owner == owner]
        assert names == sorted(names)
