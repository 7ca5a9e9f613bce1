"""Bad gradients, failing decompositions, spoilt bases, odd checkpoints and parameters that come and go do not derail training."""

import itertools
import math

import pytest
import torch
from mixed_parameters import KINDS, assert_same, build, loss_of_orthogonality, random, snapshot, train
from torch import nn

from ds_basisrot import BasisRotation
from ds_basisrot.optim import eigenbasis, orthonormal

# Gradients


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_is_not_finite_leaves_every_bit_where_it_was(bad, where, dtype, caplog):
    parameters, optimizer = build(dtype)
    train(parameters, optimizer, range(5))
    before = snapshot(parameters, optimizer)
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    parameters[where].grad.view(-1)[-1] = bad
    optimizer.step()  # a refresh would have been due
    assert_same(snapshot(parameters, optimizer), before)
    assert optimizer.skipped_updates == 1
    assert f"the gradient of {where} {list(KINDS[where][0])} is not finite (1 skipped so far)" in caplog.text


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_first_gradient_that_is_not_finite_makes_no_state(bad):
    parameters, optimizer = build()
    for p in parameters.values():
        p.grad = torch.full_like(p, bad)
    optimizer.step()
    assert not optimizer.state and optimizer.skipped_updates == 1
    control, its = build()
    for each in ((parameters, optimizer), (control, its)):
        train(*each, range(4))
    assert_same(snapshot(parameters, optimizer), snapshot(control, its))


@pytest.mark.parametrize("exponent", range(-30, 31, 5))
@pytest.mark.parametrize("source", eigenbasis.SOURCES)
def test_the_size_of_gradients_does_not_matter(exponent, source):
    """As in Adam, when eps does not: weights are the same for gradients from 1e-30 to 1e30."""
    kinds = ("matrix", "vector", "stack", "fused")
    (ordinary, its), (scaled, other) = (build(kinds=kinds, eps=0.0, source=source) for _ in range(2))
    train(ordinary, its, range(10))
    train(scaled, other, range(10), scale=10.0**exponent)
    assert other.skipped_updates == 0
    for a, b in zip(ordinary.values(), scaled.values()):
        torch.testing.assert_close(b, a, rtol=0, atol=2e-5)


@pytest.mark.parametrize("source", eigenbasis.SOURCES)
def test_a_state_that_takes_a_larger_unit_keeps_what_it_knows(source):
    """The unit is that of the first gradient until others have outgrown it; gradients of ordinary size have none."""

    def run(size):
        parameters, optimizer = build(kinds=("matrix", "vector", "stack", "fused"), eps=0.0, source=source)
        units = []
        for seeds, growth in ((range(1), 1e-9), (range(1, 6), 10.0), (range(6, 12), 1e4)):
            train(parameters, optimizer, seeds, scale=size * growth)
            units.append(optimizer.state[parameters["vector"]]["gradient_scale"])
        return torch.cat([p.detach().flatten() for p in parameters.values()]), units

    ordinary, one = run(1.0)
    tiny, (first, second, third) = run(2.0**-40)
    assert one == [1.0, 1.0, 1.0] and first == second < third < 1e-6
    torch.testing.assert_close(tiny, ordinary, rtol=0, atol=2e-5)


def test_powers_of_two_change_no_bit():
    (ordinary, its), (scaled, other) = (build(kinds=("matrix",), eps=0.0) for _ in range(2))
    train(ordinary, its, range(10))
    train(scaled, other, range(10), scale=2.0**-20)
    assert torch.equal(ordinary["matrix"], scaled["matrix"])


@pytest.mark.parametrize("source", eigenbasis.SOURCES)
def test_all_zero_gradients_let_momentum_fade_and_move_nothing_for_ever(source):
    parameters, optimizer = build(weight_decay=0.0, source=source)
    train(parameters, optimizer, range(5))
    for _ in range(400):
        before = [p.detach().clone() for p in parameters.values()]
        for p in parameters.values():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(parameters.values(), before))
    train(parameters, optimizer, range(5, 8))
    assert all(p.isfinite().all() for p in parameters.values())
    assert loss_of_orthogonality(optimizer.state[parameters["matrix"]]["left_basis"]) <= 1e-4


@pytest.mark.parametrize("source", eigenbasis.SOURCES)
@pytest.mark.parametrize("geometry", eigenbasis.GEOMETRIES)
def test_gradients_of_rank_one_move_weights_in_their_direction_alone(source, geometry):
    column, row = random(12, 1, seed=1), random(1, 20, seed=2)
    p = nn.Parameter(torch.zeros(12, 20))
    optimizer = BasisRotation([p], lr=1e-2, weight_decay=0.0, refresh_period=2, source=source, geometry=geometry)
    for seed in range(20):
        p.grad = column @ row * (1 + 0.1 * random(1, seed=seed))
        optimizer.step()
        assert loss_of_orthogonality(optimizer.state[p]["left_basis"]) <= 1e-4
    direction = -p.detach() / p.detach().norm()
    if geometry == "bilateral" or geometry == "auto":
        torch.testing.assert_close(direction, column @ row / (column.norm() * row.norm()), rtol=0, atol=1e-3)
    else:  # the right side has Adam's signs
        assert ((column.mT @ direction).sign() == row.sign()).all()
        assert (direction - column @ (column.mT @ direction) / column.square().sum()).norm() <= 1e-3


def random_basis(side, seed):
    return torch.linalg.qr(random(side, side, seed=seed)).Q


class Quadratic:
    """|A (W - W*) B|^2 / 2 for a weight [128, 64], with condition numbers of 3 on both sides."""

    def __init__(self):
        self.left, self.right = (random_basis(k, seed=k) * torch.logspace(0, -0.5, k) @ random_basis(k, seed=k + 1) for k in (128, 64))
        self.target = random(128, 64)

    def loss(self, weight):
        return 0.5 * (self.left @ (weight - self.target) @ self.right).square().mean()

    def train(self, updates, spike_at=None, **options):
        p = nn.Parameter(torch.zeros(128, 64))
        optimizer = BasisRotation([p], weight_decay=0.0, **options)
        losses, steps = [], []
        for t in range(1, updates + 1):
            optimizer.zero_grad()
            loss = self.loss(p)
            loss.backward()
            if t == spike_at:
                p.grad.mul_(1000)
            before = p.detach().clone()
            optimizer.step()
            losses.append(loss.item())
            steps.append((p.detach() - before).square().mean().sqrt().item())
        return losses, steps


@pytest.mark.parametrize("source", eigenbasis.SOURCES)
def test_training_recovers_from_a_gradient_a_thousand_times_too_large(source):
    """Steps stay of the size of the learning rate; they are smaller for a while, as in Adam, until the second moment has forgotten."""
    options = {"lr": 0.2, "betas": (0.9, 0.95), "source": source}
    calm, _ = Quadratic().train(200, **options)
    spiked, steps = Quadratic().train(200, spike_at=50, **options)
    assert calm[-1] < 1e-3 * calm[0] and spiked[-1] < 1e-2 * calm[0]
    assert max(spiked[49:]) < 0.3 * calm[0]
    assert max(steps) <= options["lr"]


# Bases


def run_crossing(**options):
    """Gradients along two fixed directions on each side, whose sizes cross at update 30; an optimizer and its matrix afterwards."""
    left, right = (random_basis(k, seed=k) for k in (8, 6))
    p = nn.Parameter(torch.zeros(8, 6))
    optimizer = BasisRotation([p], lr=1e-2, weight_decay=0.0, refresh_period=5, noise_floor=1e-4, **options)
    orders = []
    for t in range(60):
        generator = torch.Generator().manual_seed(t)
        sizes = torch.ones(6) * 1e-3
        sizes[0], sizes[1] = (4.0, 1.0) if t < 30 else (0.25, 2.0)
        p.grad = (left[:, :6] * sizes * torch.randn(6, generator=generator)) @ right.T
        optimizer.step()
        state = optimizer.state[p]
        orders.append((left.T @ state["left_basis"]).abs().argmax(0)[:2].tolist())
    return optimizer.state[p], left, right, orders


@pytest.mark.parametrize("source", eigenbasis.SOURCES)
def test_the_second_moment_follows_its_directions_when_eigenvalues_cross(source):
    """Decays are long: after the crossing the second moment of the first direction is still an average over both halves."""
    state, left, right, orders = run_crossing(betas=(0.5, 0.999), covariance_beta=0.5, source=source)
    assert orders[0] == [0, 1] and orders[-1] == [1, 0]  # ordered by size, then and now
    second_moment = torch.zeros(6)
    for t in range(60):
        draws = torch.randn(6, generator=torch.Generator().manual_seed(t))
        sizes = torch.tensor([4.0, 1.0] if t < 30 else [0.25, 2.0])
        second_moment[:2] = 0.999 * second_moment[:2] + 0.001 * (sizes * draws[:2]).square()
    rows = (left.T @ state["left_basis"]).abs().argmax(0)
    columns = (right.T @ state["right_basis"]).abs().argmax(0)
    for direction in (0, 1):
        row, column = (rows == direction).nonzero()[0, 0], (columns == direction).nonzero()[0, 0]
        torch.testing.assert_close(state["rotated_exp_avg_sq"][row, column], second_moment[direction], rtol=2e-2, atol=0)


@pytest.mark.parametrize("what", ["eigh", "qr"])
def test_a_decomposition_that_raises_keeps_the_basis_and_the_third_in_a_row_is_an_error(what, monkeypatch, caplog):
    parameters, optimizer = build(kinds=("matrix",), refresh_period=2)
    state, original = optimizer.state[parameters["matrix"]], getattr(torch.linalg, what)

    def fail(*_, **__):
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    def set_working(working):
        monkeypatch.setattr(torch.linalg, what, original if working else fail)

    set_working(False)
    train(parameters, optimizer, range(1))  # the cold start needs both
    state = optimizer.state[parameters["matrix"]]
    assert state["failed_refreshes"] == [1] and "basis of matrix [6, 9] kept" in caplog.text
    assert torch.equal(state["left_basis"], torch.eye(6)) and torch.equal(state["right_basis"], torch.eye(9))
    set_working(True)
    train(parameters, optimizer, range(1, 4))
    assert state["failed_refreshes"] == [0]
    if what == "eigh":
        return  # of the cold start alone
    set_working(False)
    basis = state["left_basis"].clone()
    train(parameters, optimizer, range(4, 8))
    assert state["failed_refreshes"] == [2] and torch.equal(state["left_basis"], basis)
    set_working(True)
    train(parameters, optimizer, range(8, 10))
    assert state["failed_refreshes"] == [0] and not torch.equal(state["left_basis"], basis)
    set_working(False)
    train(parameters, optimizer, range(10, 14))
    with pytest.raises(RuntimeError, match=r"basis of matrix \[6, 9\] could not be refreshed 3 times in a row"):
        train(parameters, optimizer, range(14, 16))
    assert parameters["matrix"].isfinite().all()


def test_a_refresh_that_fails_on_one_side_changes_neither(monkeypatch):
    parameters, optimizer = build(kinds=("matrix",), refresh_period=2)
    train(parameters, optimizer, range(3))
    state, calls, original = optimizer.state[parameters["matrix"]], itertools.count(), orthonormal.householder
    before = {key: value.clone() for key, value in state.items() if key.endswith("basis")}

    def fail_the_second(a):
        if next(calls) == 1:
            raise torch.linalg.LinAlgError("failed")
        return original(a)

    monkeypatch.setattr(orthonormal, "householder", fail_the_second)
    train(parameters, optimizer, range(3, 4))
    assert next(calls) == 2 and state["failed_refreshes"] == [1]
    assert all(torch.equal(state[key], value) for key, value in before.items())


def test_parts_that_fail_in_one_update_have_each_failed_once(monkeypatch):
    parameters, optimizer = build(kinds=("fused",), refresh_period=2, stagger=False)
    train(parameters, optimizer, range(1))

    def fail(*_):
        raise torch.linalg.LinAlgError("failed")

    monkeypatch.setattr(eigenbasis, "power_step", fail)
    train(parameters, optimizer, range(1, 5))  # the second failure of each
    with pytest.raises(RuntimeError, match="3 times in a row"):
        train(parameters, optimizer, range(5, 6))


@pytest.mark.parametrize("source", eigenbasis.SOURCES)
@pytest.mark.parametrize("shape", [(6, 9), (90, 70)], ids=str)
def test_a_basis_that_lost_its_orthogonality_has_it_back_after_the_next_refresh(source, shape):
    p = nn.Parameter(torch.zeros(shape))
    optimizer = BasisRotation([p], lr=1e-2, refresh_period=4, source=source)
    for seed in range(14):
        p.grad = random(*shape, seed=seed)
        optimizer.step()
        state = optimizer.state[p]
        if seed == 8:  # after update 9
            for side, key in zip(shape, ("left_basis", "right_basis")):
                state[key] += 0.01 * random(side, side, seed=3) / math.sqrt(side)
                assert loss_of_orthogonality(state[key]) > 1e-3
        if seed >= 11:
            assert max(loss_of_orthogonality(state[key]) for key in ("left_basis", "right_basis")) <= 1e-4
    assert p.isfinite().all() and p.abs().max() < 1


# Parameters and options


def test_a_learning_rate_of_zero_leaves_every_bit_of_the_weights():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        parameters, optimizer = build(dtype, lr=0.0, weight_decay=0.0)
        before = snapshot(parameters, optimizer)
        train(parameters, optimizer, range(8))
        assert all(torch.equal(p, before[kind][0]) for kind, p in parameters.items())
        assert all(optimizer.state[p]["step"] == 8 for p in parameters.values())


def test_a_closure_is_called_once_with_gradients_and_its_loss_returned():
    parameters, optimizer = build(kinds=("matrix",))
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = parameters["matrix"].square().sum()
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert calls == [True] * 5 and losses == sorted(losses, reverse=True)


def test_parameters_without_gradient_this_time_keep_weight_and_state_and_their_own_count():
    parameters, optimizer = build()
    train(parameters, optimizer, range(4))
    before = snapshot(parameters, optimizer)
    for p in parameters.values():
        p.grad = None
    optimizer.step()
    assert_same(snapshot(parameters, optimizer), before)
    parameters["vector"].grad = random(9)
    optimizer.step()
    assert optimizer.state[parameters["vector"]]["step"] == 5
    for kind, p in parameters.items():
        if kind != "vector":
            assert optimizer.state[p]["step"] == 4
    train(parameters, optimizer, range(4, 8))
    assert all(p.isfinite().all() for p in parameters.values())


def test_frozen_and_empty_parameters_are_left_alone():
    frozen, empty, flat = nn.Parameter(random(4, 4), requires_grad=False), nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(0))
    matrix = nn.Parameter(random(4, 4))
    optimizer = BasisRotation([frozen, empty, matrix, flat], lr=1e-2)
    for seed in range(4):
        matrix.grad, empty.grad, flat.grad = random(4, 4, seed=seed), torch.zeros(0, 4), torch.zeros(0)
        optimizer.step()
    assert list(optimizer.state) == [matrix] and torch.equal(frozen, random(4, 4))
    others = [nn.Parameter(p.detach().clone()) for p in (frozen, empty, matrix, flat)]
    BasisRotation(others, lr=1e-2).load_state_dict(optimizer.state_dict())


def test_tied_weights_are_one_parameter_with_the_sum_of_their_gradients():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
            self.b.weight = self.a.weight

    module = Tied()
    with torch.no_grad():
        module.a.weight.copy_(random(5, 5))
    alone = nn.Parameter(random(5, 5))
    optimizers = BasisRotation(module.parameters(), lr=1e-2), BasisRotation([alone], lr=1e-2)
    x = random(3, 5)
    for _ in range(5):
        module.b(module.a(x)).square().sum().backward()
        nn.functional.linear(nn.functional.linear(x, alone), alone).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(module.a.weight, alone) and module.b.weight is module.a.weight
