"""Units and layouts: every element of every matrix lies in exactly one place, and is owned with exactly one matrix."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from model_shapes import MODELS, THIRDS, moe, roles_of, units_in

from ds_basisrot.optim import refresh
from ds_basisrot.sharding.layouts import LAYOUTS, cut_by_itself, cut_in_buffer, one_buffer, own_chunks
from ds_basisrot.sharding.ownership import LONGEST_CYCLE
from ds_basisrot.sharding.units import Piece, due_updates, units_of


def buffers_of_one(numels, ranks):
    """The slow twin of ZeRO 1 and 2: one buffer of (parameter, element), padded, cut."""
    everything = [(index, element) for index, numel in enumerate(numels) for element in range(numel)]
    everything += [None] * (-len(everything) % (2 * ranks))
    size = len(everything) // ranks
    return [everything[rank * size : (rank + 1) * size] for rank in range(ranks)]


def buffers_of_chunks(numels, ranks):
    """The slow twin of ZeRO 3: each parameter padded and cut, then joined."""
    buffers = [[] for _ in range(ranks)]
    for index, numel in enumerate(numels):
        elements = [(index, element) for element in range(numel)] + [None] * (-numel % ranks)
        size = len(elements) // ranks
        for rank in range(ranks):
            buffers[rank] += elements[rank * size : (rank + 1) * size]
    return buffers


@pytest.mark.parametrize(("layout", "twin"), [(one_buffer, buffers_of_one), (own_chunks, buffers_of_chunks)])
@given(numels=st.lists(st.integers(1, 30), max_size=6), ranks=st.integers(1, 7))
@settings(deadline=None)
def test_slices_are_where_the_elements_are(layout, twin, numels, ranks):
    buffers, pieces = twin(numels, ranks), layout(numels, ranks)
    for index, numel in enumerate(numels):
        found = [(piece.rank, place) for piece in pieces[index] for place in range(piece.start, piece.start + piece.numel)]
        assert [buffers[rank][place] for rank, place in found] == [(index, element) for element in range(numel)]
        assert len({piece.rank for piece in pieces[index]}) == len(pieces[index])
        assert [piece.offset for piece in pieces[index]] == sorted(piece.offset for piece in pieces[index])


def test_layouts_are_those_of_zero():
    assert cut_in_buffer(first=5, numel=10, size=6) == (Piece(0, 5, 0, 1), Piece(1, 0, 1, 6), Piece(2, 0, 7, 3))
    assert cut_in_buffer(first=6, numel=6, size=6) == (Piece(1, 0, 0, 6),)
    assert cut_by_itself(numel=10, ranks=4, start=7) == (Piece(0, 7, 0, 3), Piece(1, 7, 3, 3), Piece(2, 7, 6, 3), Piece(3, 7, 9, 1))
    assert [piece.rank for piece in cut_by_itself(numel=3, ranks=4, start=0)] == [0, 1, 2]
    assert [sum(piece.numel for piece in pieces) for pieces in one_buffer([5, 5], ranks=3)] == [5, 5]
    assert one_buffer([7], ranks=2)[0][0].numel == 4  # padded to parts of even size


def test_a_piece_is_a_view_of_its_buffer():
    buffer = torch.arange(10)
    assert Piece(0, 2, 0, 3).of(buffer).tolist() == [2, 3, 4]
    Piece(0, 2, 0, 3).of(buffer).zero_()
    assert buffer.tolist() == [0, 1, 0, 0, 0, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("ranks", (1, 2, 5))
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("model", MODELS)
def test_units_are_the_rotated_parameters_piece_by_piece(model, stage, ranks):
    parameters = list(MODELS[model](layers=2))
    units = units_in(parameters, stage, ranks)
    assert len({unit.name for unit in units}) == len(units)
    assert sum(unit.numel for unit in units) == sum(math.prod(shape) for _, shape, entry in parameters if entry is not False)
    for unit in units:
        assert math.prod(unit.shape) == unit.numel == sum(piece.numel for piece in unit.pieces)
        place = 0
        for piece in unit.pieces:
            assert piece.offset == place
            place += piece.numel


def test_each_matrix_of_a_stack_is_a_unit():
    units = units_in([("experts", (3, 4, 5), True)], 1, 2)
    assert [unit.name for unit in units] == ["experts[0]", "experts[1]", "experts[2]"]
    assert [unit.shape for unit in units] == [(1, 4, 5)] * 3
    assert [unit.pieces for unit in units] == [
        (Piece(0, 0, 0, 20),), (Piece(0, 20, 0, 10), Piece(1, 0, 10, 10)), (Piece(1, 10, 0, 20),),
    ]  # fmt: skip
    assert units[0].role.stacks[0].shape == (4, 5)


def test_a_matrix_of_a_stack_is_refreshed_when_it_is_in_the_whole():
    ((shape, role),) = roles_of([("experts", (5, 4, 6), {"rows": [2, 2], "names": ["gate", "up"]})], refresh_period=3).values()
    units = units_of("experts", shape, role, ())
    for index, unit in enumerate(units):
        for own, its in zip(unit.role.stacks, role.stacks):
            assert own.key("left_basis") == its.key("left_basis")
            for update in range(1, 12):
                assert unit.role.due(own, update) == [0] * (index in role.due(its, update))


def test_a_fused_matrix_is_one_unit():
    (unit,) = units_in([("qkv", (3072, 1024), THIRDS)], 3, 4)
    assert (unit.name, unit.shape, len(unit.role.stacks), len(unit.pieces)) == ("qkv", (3072, 1024), 3, 4)


def test_what_moves_is_what_the_owner_does_not_hold():
    units = units_in([("a", (4, 5), True), ("b", (4, 5), True)], 1, 2)
    assert [(unit.moving, unit.stays) for unit in units] == [(0, True), (20, False)]
    units[1].owner = 1
    assert (units[1].moving, units[1].stays) == (0, True)
    (cut,) = units_in([("a", (4, 5), True)], 3, 3)
    assert [(cut.moving, cut.stays) for cut.owner in range(3)] == [(13, False), (13, False), (14, False)]


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 100), st.integers(0, 5))
def test_refreshes_fall_into_the_updates_that_the_schedule_says(numerator, denominator, offset, cycles):
    assume(numerator <= denominator)
    rate = Fraction(numerator, denominator)
    first = 2 + cycles * rate.denominator
    due = {update % rate.denominator for update in range(first, first + rate.denominator) if refresh.is_due(update, rate, offset)}
    assert due == set(due_updates(rate, offset))


@pytest.mark.parametrize("period", (1, 3, 10, 64, 100, 1000))
def test_work_is_that_of_the_roles_updates(period):
    for unit in units_in(moe(layers=1, experts=3), 1, 2, refresh_period=period):
        work = unit.load("float32").work
        assert len(work) == min(period, LONGEST_CYCLE)
        cycle = range(2, 2 + period)
        if period <= LONGEST_CYCLE:
            assert [work[update % period] for update in cycle] == [unit.role.cost(update) for update in cycle]
        assert sum(work) / len(work) == pytest.approx(sum(map(unit.role.cost, cycle)) / period, rel=1e-6)


def test_a_load_has_the_state_and_the_holders():
    (unit,) = units_in([("a", (40, 50), True)], 3, 3)
    assert unit.load("float32").held == {0: 667, 1: 667, 2: 666}
    numbers = 2 * 40 * 50 + 2 * (40 * 40 + 50 * 50)  # moments; bases, and covariances, which are not packed below 128
    assert unit.load("float32").state_bytes == 4 * numbers
    assert unit.load("bfloat16").state_bytes == 4 * numbers - 2 * (40 * 50 + 40 * 40 + 50 * 50)


def test_every_stage_that_shares_has_a_layout():
    assert set(LAYOUTS) == {1, 2, 3}
