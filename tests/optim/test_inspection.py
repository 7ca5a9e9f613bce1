"""What `inspection.measure` says of a run, and that it changes nothing."""

import math

import pytest
import torch
from torch import nn

from ds_basisrot import BasisRotation, param_groups
from ds_basisrot.optim import diagnostics, inspection
from ds_basisrot.optim.inspection import measure

METRICS = ("misalignment_standard", "misalignment_rotated", "refresh_angle_degrees", "persistence")
NAMES = {f"{metric}_{what}" for metric in METRICS for what in ("mean", "max")} | {"skipped_updates"}
SHAPES = [(6, 6), (4, 7), (8, 3)]


def optimizer(shapes=SHAPES, **options):
    torch.manual_seed(0)
    return BasisRotation([nn.Parameter(torch.randn(shape)) for shape in shapes], refresh_period=3, **options)


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def train(optimizer, updates, seed=0, after_update=lambda: None):
    """Gradients whose covariances have eigenvectors far from the axes and well apart eigenvalues, the same ones for all updates."""
    frames = [
        [torch.linalg.qr(torch.randn(k, k, generator=torch.Generator().manual_seed(k))).Q for k in p.shape[-2:]]
        for p in parameters(optimizer)
    ]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        for p, (left, right) in zip(parameters(optimizer), frames):
            m, n = p.shape[-2:]
            sizes = torch.logspace(0, -2, m)[:, None] * torch.logspace(0, -2, n)
            p.grad = (left @ (sizes * torch.randn(p.shape, generator=generator)) @ right.T).detach()
        optimizer.step()
        after_update()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"source": "first_order"},
        {"geometry": "unilateral"},
        {"geometry": "unilateral", "source": "first_order"},
        {"state_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_rotation_aligns_what_the_standard_basis_does_not(options):
    each = optimizer(**options)
    train(each, 40)
    numbers = measure(each)
    assert set(numbers) == NAMES and all(math.isfinite(v) for v in numbers.values())
    assert numbers["misalignment_standard_mean"] > 0.4 and numbers["misalignment_rotated_mean"] < 0.2
    assert 0 < numbers["refresh_angle_degrees_mean"] <= numbers["refresh_angle_degrees_max"] < 45
    assert 0.05 < numbers["persistence_mean"] <= numbers["persistence_max"] < 0.5
    assert numbers["skipped_updates"] == 0


@pytest.mark.parametrize("source", ["second_order", "first_order"])
def test_the_numbers_are_those_of_the_plain_definitions(source):
    each = optimizer([(4, 7)], source=source, covariance_beta=0.9)
    (p,), left, right, momentum = parameters(each), torch.zeros(4, 4), torch.zeros(7, 7), torch.zeros(4, 7)

    def follow():
        left.mul_(0.9).add_(0.1 * p.grad @ p.grad.T)
        right.mul_(0.9).add_(0.1 * p.grad.T @ p.grad)
        momentum.mul_(0.9).add_(0.1 * p.grad)

    train(each, 5, after_update=follow)
    if source == "first_order":
        left, right = momentum @ momentum.T, momentum.T @ momentum
    state, numbers = each.state[p], measure(each)
    sides = [(left, state["left_basis"]), (right, state["right_basis"])]
    for name, values in {
        "misalignment_standard": [diagnostics.misalignment(c) for c, _ in sides],
        "misalignment_rotated": [diagnostics.misalignment(c, basis) for c, basis in sides],
    }.items():
        assert numbers[f"{name}_mean"] == pytest.approx(float(sum(values) / 2), rel=1e-3, abs=1e-6)
        assert numbers[f"{name}_max"] == pytest.approx(float(max(values)), rel=1e-3, abs=1e-6)
    moments = state["rotated_exp_avg"], state["rotated_exp_avg_sq"]
    assert numbers["persistence_mean"] == pytest.approx(float(diagnostics.persistence(*moments, 5, (0.9, 0.999))))


@pytest.mark.parametrize("source", ["second_order", "first_order"])
def test_the_angle_is_that_of_a_refresh_made_now(source):
    """Measured before an update whose refresh the update itself hardly changes, against what it does to the basis."""
    each = optimizer([(5, 5)], source=source, geometry="unilateral", betas=(1 - 1e-6, 1 - 1e-6), covariance_damping=0.0)
    (p,) = parameters(each)
    covariance = torch.diag(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]))
    train(each, 2)
    state = each.state[p]
    before = torch.linalg.qr(torch.eye(5) + 0.1 * torch.randn(5, 5, generator=torch.Generator().manual_seed(1))).Q
    state["right_basis"].copy_(before.flip(1))  # the refresh will order the columns, too, which is no turn
    state["rotated_exp_avg"].copy_(covariance.sqrt() @ before.flip(1))
    if source == "second_order":
        state["right_covariance"].copy_(covariance.flatten())
    numbers = measure(each)
    p.grad = 1e-3 * torch.eye(5)
    each.step()  # the third update, with the only refresh
    after = state["right_basis"]
    weights = (after * (covariance @ after)).sum(0)
    expected = diagnostics.rotation_angle(before, after, weights=weights)
    assert numbers["refresh_angle_degrees_mean"] == pytest.approx(float(expected), rel=0.01)
    assert 1 < numbers["refresh_angle_degrees_mean"] < 15


def test_oscillating_updates_persist_less_than_steady_ones():
    persistence = {}
    for name, sign in (("steady", 1), ("oscillating", -1)):
        each = optimizer()
        gradients = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for p in parameters(each)]
        for update in range(40):
            for p, gradient in zip(parameters(each), gradients):
                p.grad = sign**update * gradient
            each.step()
        persistence[name] = measure(each)["persistence_mean"]
    assert persistence["oscillating"] < 0.1 and persistence["steady"] > 0.8


@pytest.mark.parametrize("source", ["second_order", "first_order"])
def test_measuring_after_every_update_leaves_training_bitwise_unchanged(source):
    measured, plain = optimizer(source=source), optimizer(source=source)
    state = torch.get_rng_state()
    train(measured, 12, after_update=lambda: measure(measured))
    assert torch.equal(torch.get_rng_state(), state)
    train(plain, 12)
    for p, q in zip(parameters(measured), parameters(plain)):
        assert torch.equal(p, q) and measured.state[p].keys() == plain.state[q].keys()
        for key, value in measured.state[p].items():
            assert torch.equal(value, plain.state[q][key]) if torch.is_tensor(value) else value == plain.state[q][key]


def test_turns_with_a_limit_go_round_all_matrices(monkeypatch):
    seen, original = [], inspection._metrics
    monkeypatch.setattr(inspection, "_metrics", lambda matrix: (seen.append(tuple(matrix.momentum.shape)), original(matrix))[1])
    each = optimizer()
    train(each, 2)
    for turn, expected in enumerate([[0, 1], [2, 0], [1, 2], [0, 1]]):
        seen.clear()
        measure(each, limit=2, turn=turn)
        assert seen == [SHAPES[i] for i in expected]
    seen.clear()
    measure(each, limit=10, turn=1)
    assert sorted(seen) == sorted(SHAPES)


def test_without_a_basis_there_is_nothing_but_the_skipped_updates():
    each = optimizer()
    assert measure(each) == {"skipped_updates": 0.0}
    for p in parameters(each):
        p.grad = torch.full_like(p, math.nan)
    each.step()
    assert measure(each) == {"skipped_updates": 1.0}


def test_matrices_of_a_stack_count_one_by_one_once_they_have_a_basis(monkeypatch):
    seen, original = [], inspection._metrics
    monkeypatch.setattr(inspection, "_metrics", lambda matrix: (seen.append(matrix.momentum.clone()), original(matrix))[1])
    experts = nn.Parameter(torch.randn(3, 4, 5))
    each = BasisRotation([{"params": [experts], "rotate": True}])
    experts.grad = torch.randn(3, 4, 5)
    experts.grad[1] = 0.0  # an expert that no token has reached
    each.step()
    numbers = measure(each)
    momentum = each.state[experts]["rotated_exp_avg"]
    assert len(seen) == 2 and torch.equal(seen[0], momentum[0]) and torch.equal(seen[1], momentum[2])
    assert numbers["misalignment_rotated_max"] < 1e-6 and numbers["misalignment_standard_mean"] > 0.1  # one gradient: its own basis


def test_a_model_under_autocast_is_measured_in_full_precision():
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
    each = BasisRotation(param_groups(model, holds_output=False), refresh_period=3)
    for _ in range(4):
        model(torch.randn(8, 12)).square().mean().backward()
        each.step()
    expected = measure(each)
    with torch.autocast("cpu", torch.bfloat16):
        assert measure(each) == expected
