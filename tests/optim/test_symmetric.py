"""Packed symmetric matrices equal dense float64 ones, whatever the side, the stack and the kind of decay."""

import pytest
import torch

from ds_basisrot.optim.symmetric import PANEL_ROWS, add_gram, packed_size, unpack

SIDES = [1, 2, 3, 127, 128, 129, 200, 256, 300]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def accumulated(side, lead=(), columns=5, updates=4, decay=0.9, weight=0.1):
    """A packed matrix after some updates and its dense float64 twin."""
    packed = torch.zeros(*lead, packed_size(side))
    dense = torch.zeros(*lead, side, side, dtype=torch.float64)
    for seed in range(updates):
        x = random(*lead, side, columns, seed=seed)
        add_gram(packed, x, decay, weight)
        dense = float(decay) * dense + weight * x.double() @ x.double().mT
    return packed, dense


@pytest.mark.parametrize("decay", [0.9, 0.0, torch.tensor(0.9), torch.tensor(1.0)], ids=repr)
@pytest.mark.parametrize("lead", [(), (3,), (1,), (2, 2)], ids=str)
@pytest.mark.parametrize("side", SIDES)
def test_a_decaying_sum_of_grams_is_the_dense_one(side, lead, decay):
    packed, dense = accumulated(side, lead, decay=decay)
    torch.testing.assert_close(unpack(packed, side).double(), dense, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", SIDES)
def test_an_unpacked_matrix_is_symmetric_and_a_copy(side):
    packed, _ = accumulated(side)
    whole, before = unpack(packed, side), packed.clone()
    torch.testing.assert_close(whole, whole.mT, rtol=0, atol=1e-6)
    assert whole.shape == (side, side) and whole.is_contiguous()
    whole.zero_()
    assert torch.equal(packed, before)


@pytest.mark.parametrize("side", SIDES)
def test_every_number_of_the_lower_triangle_is_stored_once(side):
    """Writing 0, 1, 2, ... into the packed numbers shows each one in the lower triangle, or in a square on the diagonal, once."""
    whole = unpack(torch.arange(float(packed_size(side))), side)
    panel = torch.arange(side) // PANEL_ROWS
    stored = whole[panel[:, None] >= panel[None, :]]
    assert torch.equal(stored.sort().values, torch.arange(float(packed_size(side))))
    assert side * (side + 1) / 2 <= packed_size(side) <= side * (side + PANEL_ROWS) / 2 + PANEL_ROWS * PANEL_ROWS


def test_a_transposed_factor_and_a_part_of_a_larger_tensor_are_accepted():
    gradient = random(40, 150)
    packed, dense = torch.zeros(packed_size(150)), gradient[:20].double().mT @ gradient[:20].double()
    add_gram(packed, gradient[:20].mT, 0.0, 1.0)
    torch.testing.assert_close(unpack(packed, 150).double(), dense, rtol=0, atol=1e-4)


def test_one_matrix_of_a_stack_is_a_view_that_is_updated_in_place():
    packed, _ = accumulated(130, (3,))
    before = packed.clone()
    add_gram(packed[1], random(130, 5), 0.5, 1.0)
    assert torch.equal(packed[0], before[0]) and torch.equal(packed[2], before[2]) and not torch.equal(packed[1], before[1])


def test_a_decay_of_one_and_a_factor_of_zeros_change_nothing():
    """What a shut gate asks for."""
    packed, _ = accumulated(200)
    before = packed.clone()
    add_gram(packed, torch.zeros(200, 7), torch.tensor(1.0), 0.1)
    assert torch.equal(packed, before)
