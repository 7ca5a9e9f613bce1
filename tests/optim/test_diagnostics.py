"""Each diagnostic equals its slow float64 twin, keeps its limits, and leaves the model and the random numbers as they were."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ds_basisrot.optim import diagnostics

SEEDS = st.integers(0, 10_000)
SIDES = st.integers(1, 9)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_basis(*shape, seed=0):
    return torch.linalg.qr(random(*shape, seed=seed)).Q


def random_covariance(k, seed=0):
    factor = random(k, k + 2, seed=seed)
    return factor @ factor.T


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def slow_rotated(covariance, basis):
    k = len(covariance)
    a = torch.zeros(k, k, dtype=torch.float64)
    for i in range(k):
        for j in range(k):
            a[i, j] = basis[:, i] @ covariance @ basis[:, j]
    return a.tolist()


def slow_misalignment(covariance, basis):
    a = slow_rotated(covariance, basis)
    off = sum(x * x for i, row in enumerate(a) for j, x in enumerate(row) if i != j)
    return off / sum(x * x for row in a for x in row)


def slow_relative_11_norm(covariance, basis):
    norm = sum(abs(x) for row in slow_rotated(covariance, basis) for x in row)
    return norm / float(torch.linalg.eigvalsh(covariance).sum())


TWINS = {diagnostics.misalignment: slow_misalignment, diagnostics.relative_11_norm: slow_relative_11_norm}


@pytest.mark.parametrize("fast, slow", TWINS.items())
@settings(max_examples=25, deadline=None)
@given(k=SIDES, seed=SEEDS)
def test_misalignment_is_its_twin_in_any_basis(fast, slow, k, seed):
    covariance, basis = random_covariance(k, seed), random_basis(k, k, seed=seed + 1)
    assert float(fast(covariance, basis)) == pytest.approx(slow(covariance, basis), rel=1e-9, abs=1e-14)
    assert float(fast(covariance)) == pytest.approx(slow(covariance, torch.eye(k).double()), rel=1e-9)
    assert float(fast(covariance.float(), basis.float())) == pytest.approx(slow(covariance, basis), rel=1e-3, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(k=SIDES, seed=SEEDS, exponent=st.integers(-18, 18))
def test_misalignment_keeps_its_bounds_at_any_scale(k, seed, exponent):
    covariance = (random_covariance(k, seed) * 10.0**exponent).float()
    basis = random_basis(k, k, seed=seed + 1).float()
    assert 0 <= float(diagnostics.misalignment(covariance, basis)) <= 1 - 1 / k + 1e-5
    assert 1 <= float(diagnostics.relative_11_norm(covariance, basis)) <= k + 1e-4
    assert float(diagnostics.misalignment(torch.ones(k, k))) == pytest.approx(1 - 1 / k)
    assert float(diagnostics.relative_11_norm(torch.ones(k, k))) == pytest.approx(k)


@pytest.mark.parametrize("factor", [1e-38, 1.0, 1e37])
def test_misalignment_is_exact_at_zero_and_does_not_cancel_near_it(factor):
    tiny = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    assert float(diagnostics.misalignment(tiny * factor)) == 0
    assert float(diagnostics.relative_11_norm(tiny * factor)) == 1
    tiny[0, 1] = tiny[1, 0] = 1e-6
    assert float(diagnostics.misalignment(tiny)) == pytest.approx(2e-12 / 14, rel=1e-5)


def test_an_eigenbasis_is_aligned_to_rounding():
    covariance = random_covariance(32).float()
    assert float(diagnostics.misalignment(covariance)) > 0.1
    assert float(diagnostics.misalignment(covariance, torch.linalg.eigh(covariance).eigenvectors)) < 1e-11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_zero_covariance_is_aligned_and_a_nan_is_seen(dtype):
    zero = torch.zeros(2, 3, 3, dtype=dtype)
    assert diagnostics.misalignment(zero, torch.eye(3)).tolist() == [0, 0]
    assert diagnostics.relative_11_norm(zero, torch.eye(3)).tolist() == [1, 1]
    zero[1, 0, 2] = math.nan
    for metric in TWINS:
        assert metric(zero).isnan().tolist() == [False, True]


@pytest.mark.parametrize("metric", TWINS)
def test_batched_misalignment_is_a_loop(metric):
    covariances, bases = torch.stack([random_covariance(4, seed) for seed in range(6)]), random_basis(6, 4, 4)
    looped = torch.stack([metric(c, u) for c, u in zip(covariances, bases)])
    torch.testing.assert_close(metric(covariances.view(2, 3, 4, 4), bases.view(2, 3, 4, 4)), looped.view(2, 3))


def slow_rotation_angle(old, new, order, weights):
    angles = []
    for i in range(old.shape[-1]):
        cosine = min(1.0, abs(float(old[:, int(order[i])] @ new[:, i])))
        angles.append(math.degrees(math.acos(cosine)))
    return sum(w * a for w, a in zip(weights.tolist(), angles)) / float(weights.sum())


@settings(max_examples=40, deadline=None)
@given(k=SIDES, seed=SEEDS)
def test_rotation_angle_is_its_twin(k, seed):
    old, new = random_basis(k, k, seed=seed), random_basis(k, k, seed=seed + 1)
    order = torch.randperm(k, generator=generator(seed))
    weights = random(k, seed=seed).abs()
    expected = slow_rotation_angle(old, new, order, weights)
    assert float(diagnostics.rotation_angle(old, new, order, weights)) == pytest.approx(expected, rel=1e-6, abs=1e-5)
    assert float(diagnostics.rotation_angle(old.float(), new.float(), order, weights.float())) == pytest.approx(
        expected, rel=1e-4, abs=1e-4
    )
    expected = slow_rotation_angle(old, new, torch.arange(k), torch.ones(k))
    assert float(diagnostics.rotation_angle(old, new)) == pytest.approx(expected, rel=1e-6, abs=1e-5)


def turned(degrees):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


@pytest.mark.parametrize("degrees", [0, 1e-4, 1e-2, 1, 45, 89, 89.999, 90])
def test_rotation_angle_is_accurate_from_0_to_90_degrees_in_float32(degrees):
    angle = diagnostics.rotation_angle(torch.eye(2), turned(degrees).float())
    assert float(angle) == pytest.approx(degrees, rel=1e-5, abs=1e-30)


def test_a_basis_whose_columns_changed_sign_and_place_as_ordered_has_not_turned():
    old = random_basis(5, 5)
    order = torch.tensor([3, 0, 4, 1, 2])
    new = old[:, order] * torch.tensor([1, -1, 1, -1, -1])
    assert float(diagnostics.rotation_angle(old, new, order)) == 0
    assert float(diagnostics.rotation_angle(old, new)) == pytest.approx(90)


def test_columns_without_weight_do_not_count_and_no_weight_at_all_is_equal_weight():
    new = torch.block_diag(turned(0), turned(60))
    weights = torch.tensor([[1e30, 2e30, 0, -1e20], [0, 0, 0, 0], [1, 0, 1, 0]])
    angles = diagnostics.rotation_angle(torch.eye(4).expand(3, 4, 4), new.expand(3, 4, 4), weights=weights)
    assert angles.tolist() == pytest.approx([0, 30, 30])


def test_batched_rotation_angle_is_a_loop():
    old, new = random_basis(2, 3, 4, 4), random_basis(2, 3, 4, 4, seed=1)
    order, weights = random(2, 3, 4).argsort(-1), random(2, 3, 4).abs()
    looped = [[diagnostics.rotation_angle(old[i, j], new[i, j], order[i, j], weights[i, j]) for j in range(3)] for i in range(2)]
    torch.testing.assert_close(diagnostics.rotation_angle(old, new, order, weights), torch.tensor(looped).double())


@settings(max_examples=40, deadline=None)
@given(m=SIDES, n=SIDES, seed=SEEDS, exponent=st.integers(-30, 30))
def test_oscillation_is_its_twin_in_every_basis_and_scale(m, n, seed, exponent):
    update, previous = random(m, n, seed=seed), random(m, n, seed=seed + 1)
    cosine = float((update * previous).sum() / (update.norm() * previous.norm()))
    assert float(diagnostics.oscillation(update, previous)) == pytest.approx((1 - cosine) / 2, abs=1e-9)
    left, right = random_basis(m, m, seed=seed), random_basis(n, n, seed=seed)
    rotated = [(left.T @ u @ right * 10.0**e).float() for u, e in ((update, exponent), (previous, 0))]
    assert float(diagnostics.oscillation(*rotated)) == pytest.approx((1 - cosine) / 2, abs=1e-5)


def test_limits_of_oscillation():
    update = random(5, 7).float()
    orthogonal = torch.zeros(5, 7)
    orthogonal[0, 0], orthogonal[0, 1] = update[0, 1], -update[0, 0]
    previous = torch.stack([update, -2 * update, orthogonal, torch.zeros(5, 7), torch.full((5, 7), math.nan)])
    values = diagnostics.oscillation(update.expand(5, 5, 7), previous)
    assert values[:4].tolist() == pytest.approx([0, 1, 0.5, 0], abs=1e-6)
    assert values[4].isnan()


def moments(gradients, betas):
    """M and S after these gradients, as Adam keeps them."""
    momentum, second_moment = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
    for g in gradients:
        momentum.lerp_(g, 1 - betas[0])
        second_moment.lerp_(g * g, 1 - betas[1])
    return momentum, second_moment


@settings(max_examples=25, deadline=None)
@given(m=SIDES, n=SIDES, seed=SEEDS, step=st.integers(1, 12))
def test_persistence_is_its_twin(m, n, seed, step):
    betas = (0.8, 0.95)
    gradients = random(step, m, n, seed=seed)
    weights = [[(1 - beta) * beta ** (step - 1 - t) for t in range(step)] for beta in betas]
    mean = sum(w * g for w, g in zip(weights[0], gradients)) / sum(weights[0])
    square = sum(w * g * g for w, g in zip(weights[1], gradients)) / sum(weights[1])
    value = diagnostics.persistence(*moments(gradients, betas), step, betas)
    assert float(value) == pytest.approx(float(mean.abs().sum() / square.sqrt().sum()), rel=1e-9)


@pytest.mark.parametrize("step", [1, 7, 300])
def test_persistence_tells_steady_random_and_alternating_gradients_apart(step):
    betas, shape = (0.9, 0.99), (30, 40)
    steady = random(*shape).expand(step, *shape)
    alternating = steady * torch.tensor([(-1.0) ** t for t in range(step)])[:, None, None]
    values = [float(diagnostics.persistence(*moments(g, betas), step, betas)) for g in (steady, alternating)]
    assert values[0] == pytest.approx(1)
    if step == 300:
        noise = float(diagnostics.persistence(*moments(random(step, *shape), betas), step, betas))
        assert values[1] == pytest.approx(0.1 / 1.9)
        assert noise == pytest.approx(math.sqrt(2 / math.pi * 0.1 / 1.9), rel=0.05)


def test_persistence_without_gradients_is_1_and_needs_an_update():
    zero = torch.zeros(2, 3, 4)
    assert diagnostics.persistence(zero, zero, 3, (0.9, 0.99)).tolist() == [1, 1]
    with pytest.raises(ValueError, match="step: must be at least 1"):
        diagnostics.persistence(zero, zero, 0, (0.9, 0.99))


def quadratic(hessian, shape):
    """A parameter of `shape` and a loss that has `hessian` [d, d]."""
    p = nn.Parameter(random(*shape, seed=5).to(hessian.dtype))
    return p, lambda: (p.flatten() @ hessian @ p.flatten()) / 2


class TinyMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(random(4, 3) / 2), nn.Parameter(random(2, 4, seed=1) / 2)
        self.c = nn.Parameter(random(2, seed=2))
        self.unused = nn.Parameter(random(2, 2))
        self.x, self.y = random(8, 3, seed=3) * torch.tensor([3, 1, 0.3]), random(8, 2, seed=4)

    def loss(self, a=None, b=None, c=None):
        a, b, c = self.a if a is None else a, self.b if b is None else b, self.c if c is None else c
        return F.mse_loss(torch.tanh(self.x @ a.T) @ b.T + c, self.y)

    def dense_hessian(self):
        """[d, d] of a, b and c, flattened row by row and joined."""
        inputs = (self.a.detach(), self.b.detach(), self.c.detach())
        blocks = torch.autograd.functional.hessian(self.loss, inputs)
        return torch.cat([torch.cat([blocks[i][j].reshape(inputs[i].numel(), -1) for j in range(3)], 1) for i in range(3)])


def test_the_11_norm_of_an_mlp_is_that_of_its_dense_hessian():
    mlp = TinyMlp()
    expected = float(mlp.dense_hessian().abs().sum())
    parameters = [mlp.a, mlp.unused, mlp.b, mlp.c]
    assert diagnostics.hessian_11_norm(mlp.loss, parameters, 1500) == pytest.approx(expected, rel=0.08)
    assert diagnostics.hessian_frobenius_norm(mlp.loss, parameters, 500) == pytest.approx(float(mlp.dense_hessian().norm()), rel=0.08)


@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True)], ids=["both", "left", "right"])
def test_the_11_norm_in_rotated_coordinates_is_that_of_the_rotated_dense_hessian(sides):
    mlp = TinyMlp()
    bases, blocks = {}, []
    for seed, p in enumerate((mlp.a, mlp.b)):
        u, v = (random_basis(k, k, seed=seed) if on else None for k, on in zip(p.shape, sides))
        bases[p] = (u, v)
        blocks.append(torch.kron(*(torch.eye(k).double() if q is None else q.contiguous() for k, q in zip(p.shape, (u, v)))))
    to_standard = torch.block_diag(*blocks, torch.eye(2))  # vec(U X V^T) = (U kron V) vec(X), row by row
    expected = float((to_standard.T @ mlp.dense_hessian() @ to_standard).abs().sum())
    assert diagnostics.hessian_11_norm(mlp.loss, [mlp.a, mlp.b, mlp.c], 1500, bases=bases) == pytest.approx(expected, rel=0.08)


def test_the_eigenbasis_of_a_kronecker_hessian_reaches_the_smallest_11_norm():
    left, right = random_covariance(4), random_covariance(5, seed=1)
    hessian = torch.kron(left, right)
    p, loss = quadratic(hessian, (4, 5))
    bases = {p: (torch.linalg.eigh(left).eigenvectors, torch.linalg.eigh(right).eigenvectors)}
    standard = diagnostics.hessian_11_norm(loss, [p], 400)
    rotated = diagnostics.hessian_11_norm(loss, [p], 400, bases=bases)
    frobenius = diagnostics.hessian_frobenius_norm(loss, [p], 200)
    assert 1.4 * rotated < standard and rotated == pytest.approx(float(hessian.trace()), rel=0.15)
    assert diagnostics.normalised_11_norm(rotated, frobenius, 20) < 1 < diagnostics.normalised_11_norm(standard, frobenius, 20)


def test_stacked_matrices_each_have_their_own_bases():
    factors = [(random_covariance(2, s), random_covariance(3, s + 9)) for s in range(2)]
    p, loss = quadratic(torch.block_diag(*(torch.kron(*pair) for pair in factors)), (2, 2, 3))
    u, v = (torch.stack([torch.linalg.eigh(pair[side]).eigenvectors for pair in factors]) for side in (0, 1))
    trace = sum(float(left.trace() * right.trace()) for left, right in factors)
    assert diagnostics.hessian_11_norm(loss, [p], 400, bases={p: (u, v)}) == pytest.approx(trace, rel=0.15)


@pytest.mark.parametrize("kind, expected", [("one row", math.pi / 20), ("dense", 0.12), ("diagonal", 0.03)])
def test_100_probes_give_an_unbiased_estimate_with_the_documented_error(kind, expected):
    hessian = {"one row": torch.ones(1, 1).double(), "dense": random(30, 30) + random(30, 30).T, "diagonal": torch.eye(30).double()}[kind]
    p, loss = quadratic(hessian, (len(hessian), 1))
    estimates = [diagnostics.hessian_11_norm(loss, [p], 100, generator(seed)) for seed in range(30)]
    errors = torch.tensor(estimates) / float(hessian.abs().sum()) - 1
    error = float(errors.square().mean().sqrt())
    assert error == pytest.approx(expected, rel=0.35)
    assert abs(float(errors.mean())) < 3.5 * error / math.sqrt(30)


def test_few_probes_are_unbiased_too_and_a_product_rounded_to_zero_does_not_erase_its_row():
    many = nn.Parameter(torch.zeros(2000, dtype=torch.float64))
    assert diagnostics.hessian_11_norm(lambda: many.square().sum() / 2, [many], 5) == pytest.approx(2000, rel=0.1)
    p, loss = quadratic(torch.eye(40) * 1e-43, (40, 1))
    assert diagnostics.hessian_11_norm(loss, [p], 20) > 20e-43


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_float32_at_extreme_scales_agrees_with_float64(scale):
    hessian = random_covariance(12)
    (p, loss), (q, loss32) = quadratic(hessian, (3, 4)), quadratic(hessian.float() * scale, (3, 4))
    bases = (random_basis(3, 3), random_basis(4, 4))
    expected = diagnostics.hessian_11_norm(loss, [p], 50, bases={p: bases})
    got = diagnostics.hessian_11_norm(loss32, [q], 50, bases={q: bases})
    assert got == pytest.approx(expected * scale, rel=1e-2)


def test_rows_without_curvature_are_exactly_zero():
    p = nn.Parameter(random(3, 4))
    for loss in (lambda: p.sum(), lambda: (p * 0).square().sum()):
        assert diagnostics.hessian_11_norm(loss, [p], 5) == diagnostics.hessian_frobenius_norm(loss, [p], 5) == 0
    assert diagnostics.normalised_11_norm(0.0, 0.0, 12) == 0
    assert diagnostics.hessian_11_norm(lambda: p[0].square().sum() / 2, [p], 400) == pytest.approx(4, rel=0.15)


@settings(max_examples=25, deadline=None)
@given(d=SIDES, seed=SEEDS)
def test_the_normalised_norm_keeps_its_bounds(d, seed):
    def normalised(hessian):
        return diagnostics.normalised_11_norm(float(hessian.abs().sum()), float(hessian.norm()), len(hessian))

    symmetric, single = random(d, d, seed=seed) + random(d, d, seed=seed).T, torch.zeros(d, d)
    single[0, 0] = 3
    assert normalised(single) == pytest.approx(1 / math.sqrt(d))
    assert normalised(torch.ones(d, d)) == pytest.approx(math.sqrt(d))
    assert 1 / math.sqrt(d) - 1e-9 <= normalised(symmetric) <= math.sqrt(d) + 1e-9
    assert normalised(torch.diag(symmetric.diagonal())) <= 1 + 1e-9


class Attention(nn.Module):
    """Fused attention, dropout and a buffer, in training mode."""

    def __init__(self):
        super().__init__()
        self.map, self.norm, self.drop = nn.Linear(4, 12), nn.LayerNorm(4), nn.Dropout(0.5)
        self.register_buffer("x", random(2, 6, 4).float())

    def loss(self):
        q, k, v = self.map(self.norm(self.x)).unsqueeze(1).chunk(3, -1)
        return self.drop(F.scaled_dot_product_attention(q, k, v, is_causal=True)).square().mean()


@pytest.mark.parametrize("measure", [diagnostics.hessian_11_norm, diagnostics.hessian_frobenius_norm])
def test_measuring_is_repeatable_and_leaves_everything_as_it_was(measure):
    torch.manual_seed(0)
    model = Attention()
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.full_like(p, 7.0)
    marks = [p.grad for p in parameters]
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        values = [measure(model.loss, parameters, 10, g) for g in (generator(3), generator(3), None, None, generator(4))]
    assert values[0] == values[1] != values[4] and values[2] == values[3]
    assert all(math.isfinite(value) and value > 0 for value in values) and model.training
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is mark and bool((mark == 7).all()) for p, mark in zip(parameters, marks))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_bad_input_gets_one_line_that_says_what_to_do():
    p, loss = quadratic(torch.eye(6).double(), (2, 3))
    half = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    cases = [
        ("probes: must be at least 3", lambda: diagnostics.hessian_11_norm(loss, [p], 2)),
        ("probes: must be at least 1", lambda: diagnostics.hessian_frobenius_norm(loss, [p], 0)),
        ("parameters: there are none", lambda: diagnostics.hessian_11_norm(loss, [])),
        ("dtype torch.bfloat16", lambda: diagnostics.hessian_11_norm(loss, [half])),
        ("requires_grad=False", lambda: diagnostics.hessian_frobenius_norm(loss, [p.detach()])),
        ("loss_fn: must return a scalar", lambda: diagnostics.hessian_11_norm(lambda: p, [p])),
        ("loss_fn: must return a scalar", lambda: diagnostics.hessian_11_norm(lambda: loss().detach(), [p])),
        ("loss_fn: must return a scalar", lambda: diagnostics.hessian_11_norm(lambda: 1.0, [p])),
        (r"bases: \[3, 3\] does not fit", lambda: diagnostics.hessian_11_norm(loss, [p], bases={p: (torch.eye(3), None)})),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_summary_is_mean_and_max_over_matrices():
    assert diagnostics.summary({"a": 1.0, "b": 4.0, "c": 1.0}) == {"mean": 2.0, "max": 4.0}
    assert diagnostics.summary({}) == {}
    assert all(math.isnan(value) for value in diagnostics.summary({"a": 1.0, "b": math.nan}).values())
