"""What BasisRotation predicts of its next updates, against updates that it really makes, and against the formula in double precision."""

import copy
import math

import pytest
import torch
from mixed_parameters import KINDS, assert_same, build, random, set_gradients, snapshot, train
from torch import nn

from ds_basisrot import BasisRotation
from ds_basisrot.pipeline import weight_prediction

NO_REFRESH = {"refresh_period": 60, "stagger": False}
OPTIONS = [
    {},
    {"geometry": "unilateral"},
    {"source": "first_order", "eps": 0.0},
    {"noise_floor": 0.5},
    {"noise_floor": 0.0, "eps": 1e-2},
    {"betas": (0.5, 0.9), "weight_decay": 0.3},
    {"max_dim": 5, "state_dtype": "bfloat16"},
]


def really_stepped(parameters, optimizer, updates):
    """What copies change by in updates of zero gradients, which leave the second moments as they are. They begin at zero, for accuracy."""
    parameters, optimizer = copy.deepcopy((parameters, optimizer))
    for p in parameters.values():
        p.data.zero_()
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for _ in range(updates):
        for group in optimizer.param_groups:
            for p in group["params"]:
                for key, value in optimizer.state.get(p, {}).items():
                    if key.endswith("exp_avg_sq"):
                        value /= group["betas"][1]
        optimizer.step()
    return {kind: p.detach() for kind, p in parameters.items()}


def assert_predicts(parameters, optimizer, updates, tolerance=1e-4):
    changes, expected = optimizer.predicted_changes(updates), really_stepped(parameters, optimizer, updates)
    assert set(changes) == {p for p in parameters.values() if optimizer.state.get(p)}
    for kind, p in parameters.items():
        if p in changes:
            assert changes[p].dtype == torch.float32 and changes[p].shape == p.shape
            difference = (changes[p] - expected[kind]).norm()
            assert difference <= tolerance * expected[kind].norm() and expected[kind].norm() > 0, kind


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_optimizer_goes_where_it_predicts_to_go(options, updates):
    parameters, optimizer = build(**NO_REFRESH | options)
    train(parameters, optimizer, range(6))
    coarse = "state_dtype" in options  # each of the twin's momenta is rounded to bfloat16
    assert_predicts(parameters, optimizer, updates, 1e-2 if coarse else 1e-4)


@pytest.mark.parametrize("scale", [1e-25, 1e20])
def test_gradients_of_any_size_do(scale):
    parameters, optimizer = build(**NO_REFRESH)
    train(parameters, optimizer, range(4), scale)
    assert optimizer.state[parameters["matrix"]]["gradient_scale"] != 1.0
    assert_predicts(parameters, optimizer, 3)


def test_products_in_low_precision_predict_as_well_as_that_precision_can():
    parameters, optimizer = build(kinds=("matrix", "stack"), product_dtype="bfloat16", **NO_REFRESH)
    train(parameters, optimizer, range(4))
    assert_predicts(parameters, optimizer, 3, 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("updates", [1, 5])
@pytest.mark.parametrize("floor", [0.0, 0.7])
def test_the_sum_is_the_formula(floor, updates, dtype):
    lr, beta1, beta2, eps = 1e-2, 0.8, 0.95, 1e-3
    parameters, optimizer = build(dtype, kinds=("matrix", "stack"), noise_floor=floor, betas=(beta1, beta2), eps=eps)
    train(parameters, optimizer, range(7))
    changes = optimizer.predicted_changes(updates)
    for p in parameters.values():
        state = optimizer.state[p]
        u, v, m, s = (state[key].double() for key in ("left_basis", "right_basis", "rotated_exp_avg", "rotated_exp_avg_sq"))
        root = s.sqrt()
        denominator = torch.maximum(root, floor * s.mean((-2, -1), keepdim=True).sqrt()) + eps
        expected = torch.zeros_like(m)
        for ahead in range(1, updates + 1):
            step_size = lr * math.sqrt(1 - beta2 ** (7 + ahead)) / (1 - beta1 ** (7 + ahead))
            expected -= step_size * u @ (beta1**ahead * m / denominator) @ v.mT
        torch.testing.assert_close(changes[p].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("updates", [1, 6])
def test_what_is_not_rotated_is_predicted_bitwise_as_of_adam(updates):
    (vector, scalar), optimizer = (nn.Parameter(random(9)), nn.Parameter(random())), None
    pad = nn.Parameter(random(3, 3))
    optimizer = BasisRotation([pad, vector, scalar], lr=1e-2)
    for seed in range(5):
        for p in (vector, scalar):
            p.grad = random(*p.shape, seed=seed)
        optimizer.step()
    adam = torch.optim.AdamW([vector, scalar], lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    adam.state.update({p: optimizer.state[p] for p in (vector, scalar)})
    ours, its = (weight_prediction.predicted_changes(each, updates) for each in (optimizer, adam))
    assert set(ours) == {vector, scalar} and all(torch.equal(ours[p], its[p]) for p in its)


def test_matrices_without_a_basis_are_predicted_in_their_own():
    """Those that Adam trained before, and those of a stack that had zeros only."""
    p = nn.Parameter(random(6, 9))
    adam = torch.optim.AdamW([p], lr=1e-2)
    for seed in range(3):
        p.grad = random(6, 9, seed=seed)
        adam.step()
    optimizer = BasisRotation([p], lr=1e-2, eps=1e-3, **NO_REFRESH)
    optimizer.load_state_dict(adam.state_dict() | {"param_groups": optimizer.state_dict()["param_groups"]})
    assert optimizer.state[p]["cold"] == [0]
    assert_predicts({"matrix": p}, optimizer, 3)
    assert optimizer.state[p]["cold"] == [0]

    parameters, optimizer = build(kinds=("stack", "fused"), **NO_REFRESH)
    for seed in range(4):
        set_gradients(parameters, seed)
        parameters["stack"].grad[1] = 0.0
        optimizer.step()
    assert_predicts(parameters, optimizer, 3)
    assert not optimizer.predicted_changes(3)[parameters["stack"]][1].any()


def test_groups_have_their_own_options_and_learning_rates_as_they_stand():
    one, two = nn.Parameter(random(4, 5)), nn.Parameter(random(4, 5))
    optimizer = BasisRotation([{"params": [one]}, {"params": [two], "betas": (0.6, 0.9)}], lr=1e-2, **NO_REFRESH)
    parameters = {"one": one, "two": two}
    train(parameters, optimizer, range(4))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.3)
    assert_predicts(parameters, optimizer, 3)


def test_the_precision_of_the_gradients_decides_the_noise_floor():
    predicted = []
    for dtype in (None, torch.bfloat16):
        p = nn.Parameter(random(12, 20))
        optimizer = BasisRotation([p], lr=1e-2, **NO_REFRESH)
        optimizer.gradient_dtype = dtype
        for _ in range(3):
            p.grad = random(12, 1, seed=1) @ random(1, 20, seed=2) + 1e-4 * random(12, 20, seed=3)
            optimizer.step()
        assert_predicts({"matrix": p}, optimizer, 2)
        predicted.append(optimizer.predicted_changes(2)[p])
    assert not torch.allclose(*predicted, rtol=1e-2)


def test_nothing_changes_by_predicting_and_nothing_is_predicted_without_a_state():
    (parameters, optimizer), (control, its) = build(), build()
    assert optimizer.predicted_changes(3) == {} and not optimizer.state
    for seed in range(8):
        train(parameters, optimizer, [seed])
        train(control, its, [seed])
        for change in optimizer.predicted_changes(3).values():
            change.fill_(7.0)
    assert_same(snapshot(parameters, optimizer), snapshot(control, its))
    assert not any(change.any() for change in optimizer.predicted_changes(0).values())


def test_a_copied_or_resumed_optimizer_predicts_the_same():
    parameters, optimizer = build()
    train(parameters, optimizer, range(5))
    expected = [optimizer.predicted_changes(2)[p] for p in parameters.values()]
    others, its = copy.deepcopy((parameters, optimizer))
    resumed, loaded = build()
    loaded.load_state_dict(optimizer.state_dict())
    for them, predictor in ((others, its), (resumed, loaded)):
        changes = predictor.predicted_changes(2)
        assert all(torch.equal(changes[p], change) for p, change in zip(them.values(), expected))


def test_autocast_around_it_makes_no_difference():
    parameters, optimizer = build()
    train(parameters, optimizer, range(5))
    plain = optimizer.predicted_changes(2)
    with torch.autocast("cpu", torch.bfloat16):
        cast = optimizer.predicted_changes(2)
    assert all(torch.equal(plain[p], cast[p]) for p in plain)


def test_an_update_that_the_host_did_not_wait_for_and_was_skipped_counts_nothing(monkeypatch):
    decides, accelerator = BasisRotation._host_decides, torch.device("cuda")
    monkeypatch.setattr(BasisRotation, "_host_decides", lambda self, work, device: decides(self, work, accelerator))
    parameters, optimizer = build(**NO_REFRESH)
    train(parameters, optimizer, range(5))
    before = optimizer.predicted_changes(2)
    set_gradients(parameters, 5, math.nan)
    optimizer.step()
    assert optimizer._unread is not None
    after = optimizer.predicted_changes(2)
    assert optimizer.skipped_updates == 1 and len(after) == len(KINDS)
    assert all(torch.equal(after[p], change) for p, change in before.items())
