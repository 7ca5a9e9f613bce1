"""BasisRotation equals its slow float64 twin, for every variant and shape."""

import itertools

import pytest
import torch
from reference import ReferenceMatrix

from ds_basisrot import BasisRotation

VARIANTS = list(itertools.product(("second_order", "first_order"), ("bilateral", "unilateral")))
SHAPES = [(7, 7), (5, 11), (11, 5), (1, 6), (6, 1)]


def well_defined(source, geometry, shape, damping):
    """Without damping a refresh is well defined only where its covariance has full rank."""
    spans = geometry == "unilateral" or shape[0] == shape[1] or (source == "second_order" and 1 not in shape)
    return damping > 0 or spans


CASES = [
    (*variant, shape, damping)
    for variant in VARIANTS
    for shape in SHAPES
    for damping in (0.01, 0.0)
    if well_defined(*variant, shape, damping)
]


def gradients(shape, updates, seed=0):
    """Gradients with a decaying spectrum that turns slowly, plus noise: bases are well defined and change."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(s, s, generator=generator)).Q for s in shape)
    scale = torch.diag(2.0 ** -torch.arange(max(shape)))[: shape[0], : shape[1]]
    for _ in range(updates):
        yield left @ (scale * torch.randn(shape, generator=generator)) @ right.T + 0.1 * torch.randn(shape, generator=generator)


@pytest.mark.parametrize("source, geometry, shape, damping", CASES, ids=str)
def test_weights_follow_the_twin(source, geometry, shape, damping):
    config = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.98), "source": source, "geometry": geometry, "refresh_period": 4}
    config |= {"noise_floor": 1e-2, "covariance_damping": damping, "covariance_beta": 0.9}
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = BasisRotation([parameter], **config)
    twin = ReferenceMatrix(weight, **config)
    for gradient in gradients(shape, 30):
        parameter.grad = gradient.clone()
        optimizer.step()
        twin.step(gradient)
    moved = (twin.w - weight.double()).norm()
    assert twin.refreshes == 7
    assert (parameter.detach().double() - twin.w).norm() <= 1e-3 * moved


def test_a_stacked_weight_is_its_matrices():
    weight = torch.randn(3, 4, 6)
    stacked = torch.nn.Parameter(weight.clone())
    single = [torch.nn.Parameter(w.clone()) for w in weight]
    both = BasisRotation([{"params": [stacked], "rotate": True}], stagger=False), BasisRotation(single, stagger=False)
    for gradient in zip(*(gradients((4, 6), 22, seed) for seed in range(3))):
        stacked.grad = torch.stack(gradient)
        for parameter, g in zip(single, gradient):
            parameter.grad = g.clone()
        for optimizer in both:
            optimizer.step()
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in single]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (), (2, 3, 4, 5)], ids=str)
def test_the_rest_is_adamw(shape):
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    matrix = torch.nn.Parameter(torch.zeros(2, 2))
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    optimizers = BasisRotation([ours, matrix], **options), torch.optim.AdamW([theirs], **options)
    for _ in range(20):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_side_beyond_max_dim_is_not_rotated():
    parameter = torch.nn.Parameter(torch.zeros(4, 9))
    optimizer = BasisRotation([parameter], max_dim=8)
    parameter.grad = torch.randn(4, 9)
    optimizer.step()
    assert "left_basis" in optimizer.state[parameter] and "right_basis" not in optimizer.state[parameter]
