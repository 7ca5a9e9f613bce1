"""Gram-Schmidt is used where it is as good as Householder reflections, and only there."""

import math

import pytest
import torch

from ds_basisrot.optim import orthonormal
from ds_basisrot.optim.orthonormal import (
    BLOCK_COLUMNS,
    MENDABLE,
    PANEL_COLUMNS,
    TOLERANCE,
    gram_schmidt,
    householder,
    orthogonality_loss,
    orthonormalise,
)

SIDES = [PANEL_COLUMNS + 1, 2 * PANEL_COLUMNS, 150, BLOCK_COLUMNS + 40]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conditioned(side, condition, columns=None):
    """A float32 matrix `[side, columns]` with singular values from 1 down to 1 / condition."""
    columns = columns or side
    left, right = (torch.linalg.qr(random(rows, columns, seed=seed).double()).Q for seed, rows in enumerate((side, columns)))
    return (left * torch.logspace(0, 1, columns, base=1 / condition, dtype=torch.float64) @ right.mT).float()


def loss_of_orthogonality(q):
    q = q.double()
    return (q.mT @ q - torch.eye(q.shape[-1], dtype=torch.float64)).abs().amax().item()


@pytest.fixture
def fallbacks(monkeypatch):
    """Shapes that Householder reflections were asked for."""
    shapes, original = [], orthonormal.householder
    monkeypatch.setattr(orthonormal, "householder", lambda a: (shapes.append(tuple(a.shape)), original(a))[1])
    return shapes


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("condition", [1.0, 1e1, 1e2, 1e3, 1e4])
def test_the_factor_is_that_of_householder_in_float64_within_the_condition(side, condition, fallbacks):
    """The factor itself is determined by float32 numbers only up to eps times the condition: both ways stay within that."""
    a = conditioned(side, condition)
    exact = householder(a.double())
    q = orthonormalise(a)
    bound = 2 * torch.finfo(torch.float32).eps * condition + 2e-6
    assert (q.double() - exact).abs().amax() <= bound
    assert (householder(a).double() - exact).abs().amax() <= bound
    assert loss_of_orthogonality(q) <= 1e-4
    assert fallbacks == [] or condition > 1e1  # what a refresh orthonormalises never needs the slow way


def test_a_tall_matrix_keeps_its_shape(fallbacks):
    a = conditioned(200, 3.0, columns=90)
    torch.testing.assert_close(orthonormalise(a).double(), householder(a.double()), rtol=0, atol=1e-5)
    assert fallbacks == []


@pytest.mark.parametrize("side", SIDES)
def test_lengths_of_columns_do_not_matter(side, fallbacks):
    a = conditioned(side, 3.0)
    lengths = torch.logspace(-15, 15, side)[torch.randperm(side, generator=torch.Generator().manual_seed(0))]
    q = orthonormalise(a * lengths)
    assert fallbacks == []
    torch.testing.assert_close(q.double(), householder(a.double()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fault", ["ill-conditioned", "low rank", "equal columns", "zero columns", "all zero", "too small", "too large"])
def test_columns_that_gram_schmidt_cannot_do_fall_back_and_are_orthonormal(side, fault, fallbacks):
    a = random(side, side)
    if fault == "ill-conditioned":
        a = conditioned(side, 1e9)
    elif fault == "low rank":
        a = random(side, 7) @ random(7, side)
    elif fault == "equal columns":
        a[:, side // 2] = a[:, 3]
    elif fault == "zero columns":
        a[:, [0, side // 2, side - 1]] = 0.0
    elif fault == "all zero":
        a.zero_()
    else:
        a *= 1e-25 if fault == "too small" else 1e25  # squares leave float32
    q = orthonormalise(a)
    assert fallbacks == [(side, side)]
    assert q.isfinite().all() and loss_of_orthogonality(q) <= 1e-4


def test_what_passes_the_measurement_is_orthonormal():
    """From well to hopelessly conditioned: Gram-Schmidt either is orthonormal or is seen not to be."""
    passed = []
    for exponent in range(0, 20):
        q = gram_schmidt(conditioned(150, 10.0 ** (exponent / 2)))
        if orthogonality_loss(q) <= TOLERANCE:
            passed.append(exponent)
            assert loss_of_orthogonality(q) <= TOLERANCE
    assert passed == list(range(len(passed))) and 3 <= len(passed) < 20


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), 1.01])
def test_one_spoilt_number_is_measured(spoil):
    q = householder(random(100, 100))
    assert orthogonality_loss(q) <= TOLERANCE
    q[17, 60] = q[17, 60] * spoil + (0.01 if spoil == 1.01 else 0.0)
    assert not orthogonality_loss(q) <= TOLERANCE


@pytest.mark.parametrize("lead", [(1,), (3,), (2, 2)], ids=str)
def test_a_batch_is_its_matrices_and_each_falls_back_for_itself(lead, fallbacks):
    a = random(*lead, 70, 70) * 0.01 + torch.eye(70)
    a.view(-1, 70, 70)[0, :, 5] = 0.0
    q = orthonormalise(a)
    assert fallbacks == [(70, 70)] and q.shape == a.shape
    for one, its in zip(a.flatten(0, -3), q.flatten(0, -3)):
        assert torch.equal(orthonormalise(one), its)


@pytest.mark.parametrize("a", [random(PANEL_COLUMNS, PANEL_COLUMNS), random(5, 3), random(2, 4, 4), random(80, 80).double()])
def test_small_and_double_precision_matrices_take_householder(a, fallbacks):
    q = orthonormalise(a)
    assert len(fallbacks) == 1 and q.dtype == a.dtype and loss_of_orthogonality(q.reshape(-1, *a.shape[-2:])[0]) <= 1e-5


@pytest.mark.parametrize("function", [orthonormalise, householder, gram_schmidt])
def test_the_diagonal_of_r_is_positive_and_the_argument_untouched(function):
    a = random(100, 100)
    before = a.clone()
    r = function(a).double().mT @ a.double()
    assert (r.diagonal() > 0).all() and torch.equal(a, before)
    assert r.tril(-1).abs().amax() <= 1e-3


def test_an_orthonormal_matrix_stays_where_it_is():
    q = householder(random(150, 150))
    torch.testing.assert_close(orthonormalise(q), q, rtol=0, atol=1e-5)


def test_a_second_pass_mends_what_the_first_leaves_behind(fallbacks):
    side, condition = 200, 1e3
    left, right = (torch.linalg.qr(torch.randn(side, side, generator=torch.Generator().manual_seed(seed)).double()).Q for seed in (0, 1))
    a = (left * torch.logspace(0, -math.log10(condition), side, dtype=torch.float64) @ right).float()
    assert TOLERANCE < orthogonality_loss(gram_schmidt(a)) <= MENDABLE
    q = orthonormalise(a)
    assert fallbacks == [] and orthogonality_loss(q) <= TOLERANCE
    torch.testing.assert_close(q, householder(a.double()).float(), rtol=0, atol=3e-3)  # the condition times the rounding of `a`
