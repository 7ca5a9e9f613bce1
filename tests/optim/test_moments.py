"""Adam's moments and direction: torch's fused kernel equals the formula written out, and the formula float64's."""

import math

import pytest
import torch

from ds_basisrot.optim import moments
from ds_basisrot.optim.gradient_gate import Gate

SHAPES = [(5, 7), (64, 48), (3, 6, 4)]


def trained(update, shape, floor, scale, updates=12):
    generator = torch.Generator().manual_seed(0)
    momentum, second_moment = torch.zeros(shape), torch.zeros(shape)
    for step in range(1, 1 + updates):
        gradient = torch.randn(shape, generator=generator) * scale
        gradient[..., 0, :] = 0.0  # denominators at the floor, or at eps
        options = moments.Adam((0.9, 0.99), 1e-8 * scale, 1e-3, floor, step)
        x, step_size = update(gradient, momentum, second_moment, options, Gate())
    return x.double() * step_size, momentum, second_moment


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("floor", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_fused_kernel_equals_the_formula(shape, floor, scale):
    for fused, plain in zip(trained(moments._update_fused, shape, floor, scale), trained(moments._update, shape, floor, scale)):
        torch.testing.assert_close(fused, plain, rtol=5e-6, atol=0.0)


def test_the_formula_equals_float64():
    shape, floor, updates = (6, 5), 0.3, 9
    generator = torch.Generator().manual_seed(0)
    momentum, second_moment = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for _ in range(updates):
        gradient = torch.randn(shape, generator=generator).double()
        gradient[0] = 0.0
        momentum += 0.1 * (gradient - momentum)
        second_moment += 0.01 * (gradient**2 - second_moment)
    roots = torch.maximum(second_moment.sqrt(), floor * second_moment.mean().sqrt())
    expected = 1e-3 * momentum / (1 - 0.9**updates) / ((roots + 1e-8) / math.sqrt(1 - 0.99**updates))
    actual, _, _ = trained(moments.update, shape, floor, 1.0, updates)
    torch.testing.assert_close(actual, expected, rtol=5e-6, atol=0.0)


def test_a_gradient_that_is_not_contiguous_takes_the_written_out_formula(monkeypatch):
    monkeypatch.setattr(moments, "_update_fused", None)
    x, _ = moments.update(torch.ones(4, 3).T, torch.zeros(3, 4), torch.zeros(3, 4), moments.Adam((0.9, 0.99), 1e-8, 1e-3, 0.01, 1), Gate())
    torch.testing.assert_close(x, torch.ones(3, 4), rtol=1e-5, atol=0.0)
