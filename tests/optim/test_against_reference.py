"""BasisRotation equals its slow float64 twin, for every variant and shape."""

import itertools

import pytest
import torch
from reference import ReferenceFused, ReferenceMatrix

from ds_basisrot import BasisRotation

VARIANTS = list(itertools.product(("second_order", "first_order"), ("bilateral", "unilateral", "auto")))
SHAPES = [(7, 7), (5, 11), (11, 5), (2, 6), (6, 2), (3, 12), (12, 3)]

# Of the weights' movement. Gradients here are well-posed: rounding errors stay rounding errors, 1e-5 after 30 updates. Long sides have more
# directions without gradients, in which steps are rounding errors over the noise floor.
TOLERANCE, TOLERANCE_OF_LONG_SIDES = 5e-5, 5e-4


def is_well_posed(source, geometry, shape, damping):
    """Without damping a refresh needs what has full rank; a momentum does not span a side that is longer than the other."""
    shorter_only = geometry == "unilateral" or (geometry == "auto" and max(shape) >= 4 * min(shape))
    return damping > 0 or source == "second_order" or shorter_only or shape[0] == shape[1]


CASES = [
    (*variant, shape, damping)
    for variant in VARIANTS
    for shape in SHAPES
    for damping in (0.01, 0.0)
    if is_well_posed(*variant, shape, damping)
]


def gradients(shape, updates, seed=0):
    """Gradients with a decaying spectrum that turns slowly, plus noise: bases are well defined and change."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(s, s, generator=generator)).Q for s in shape)
    scale = torch.diag(2.0 ** -torch.arange(max(shape)))[: shape[0], : shape[1]]
    for _ in range(updates):
        yield left @ (scale * torch.randn(shape, generator=generator)) @ right.T + 0.1 * torch.randn(shape, generator=generator)


def random_weight(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def train(weight, optimizer_of, twin, updates):
    """Distance of the weight from the twin's after some updates, relative to how far that has moved."""
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = optimizer_of(parameter)
    for gradient in gradients(weight.shape, updates):
        parameter.grad = gradient.clone()
        optimizer.step()
        twin.step(gradient)
    return ((parameter.detach().double() - twin.w).norm() / (twin.w - weight.double()).norm()).item()


@pytest.mark.parametrize("source, geometry, shape, damping", CASES, ids=str)
def test_weights_follow_the_twin(source, geometry, shape, damping):
    config = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.98), "source": source, "geometry": geometry, "refresh_period": 4}
    config |= {"noise_floor": 1e-2, "covariance_damping": damping, "covariance_beta": 0.9}
    weight = random_weight(*shape)
    twin = ReferenceMatrix(weight, **config)
    assert train(weight, lambda p: BasisRotation([p], **config), twin, updates=30) <= TOLERANCE
    assert twin.refreshes == 7


@pytest.mark.parametrize("source", ["second_order", "first_order"])
@pytest.mark.parametrize("shape", [(130, 70), (70, 200), (400, 150)], ids=str)
def test_sides_of_several_panels_and_blocks_follow_the_twin(source, shape):
    """Longer than one panel of a packed covariance (128), than one of Gram-Schmidt (64), than one of its blocks (384)."""
    config = {"lr": 1e-2, "weight_decay": 0.0, "source": source, "refresh_period": 2, "noise_floor": 1e-2, "covariance_damping": 0.01}
    weight = random_weight(*shape)
    twin = ReferenceMatrix(weight, **config)
    assert train(weight, lambda p: BasisRotation([p], **config), twin, updates=5) <= TOLERANCE_OF_LONG_SIDES
    assert twin.refreshes == 2


@pytest.mark.parametrize("source, geometry", VARIANTS)
@pytest.mark.parametrize("rows, groups", [((6, 2, 4), 1), ((3, 2, 2), 2), ((12,), 1)], ids=str)
def test_a_fused_weight_follows_its_parts(source, geometry, rows, groups):
    config = {"lr": 1e-2, "weight_decay": 0.1, "source": source, "geometry": geometry, "refresh_period": 4}
    config |= {"noise_floor": 1e-2, "covariance_damping": 0.01}
    weight = random_weight(groups * sum(rows), 7)

    def fused(p):
        return BasisRotation([{"params": [p], "rotate": [{"rows": list(rows), "groups": groups}]}], stagger=False, **config)

    twin = ReferenceFused(weight, rows=rows, groups=groups, **config)
    assert train(weight, fused, twin, updates=18) <= TOLERANCE


def test_a_stacked_weight_is_its_matrices():
    weight = random_weight(3, 4, 6)
    stacked = torch.nn.Parameter(weight.clone())
    single = [torch.nn.Parameter(w.clone()) for w in weight]
    both = BasisRotation([{"params": [stacked], "rotate": True}], stagger=False), BasisRotation(single, stagger=False)
    for gradient in zip(*(gradients((4, 6), 22, seed) for seed in range(3))):
        stacked.grad = torch.stack(gradient)
        for parameter, g in zip(single, gradient):
            parameter.grad = g.clone()
        for optimizer in both:
            optimizer.step()
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in single]), rtol=0, atol=5e-6)


@pytest.mark.parametrize("shape", [(5,), (), (2, 3, 4, 5), (1, 6), (6, 1)], ids=str)
def test_the_rest_is_adamw(shape):
    """Also a matrix that is a vector: it has no basis worth turning to."""
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    matrix = torch.nn.Parameter(torch.zeros(2, 2))
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    optimizers = BasisRotation([ours, matrix], **options), torch.optim.AdamW([theirs], **options)
    for _ in range(20):
        ours.grad = torch.randn(shape)
        theirs.grad, matrix.grad = ours.grad.clone(), torch.randn(2, 2)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_side_beyond_max_dim_is_not_rotated():
    parameter = torch.nn.Parameter(torch.zeros(4, 9))
    optimizer = BasisRotation([parameter], max_dim=8)
    parameter.grad = torch.randn(4, 9)
    optimizer.step()
    assert "left_basis" in optimizer.state[parameter] and "right_basis" not in optimizer.state[parameter]
