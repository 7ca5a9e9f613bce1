"""BasisRotation as a torch optimizer: groups, schedulers, state, closures, stagger, bad options."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

from ds_basisrot import BasisRotation, param_groups
from ds_basisrot.optim import eigenbasis
from ds_basisrot.optim.rotated_adam import StackUpdate


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def set_gradients(module, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(module, optimizer, updates, first=0):
    for seed in range(first, first + updates):
        set_gradients(module, seed)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", ["second_order", "first_order"])
def test_a_run_resumed_from_its_state_dict_is_bitwise_the_run_that_went_on(dtype, source):
    one = model(dtype)
    optimizer = BasisRotation(param_groups(one), refresh_period=3, source=source)
    train(one, optimizer, 7)
    file = io.BytesIO()
    torch.save({"model": one.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = model(dtype)
    other.load_state_dict(saved["model"])
    resumed = BasisRotation(param_groups(other), refresh_period=3, source=source)
    resumed.load_state_dict(saved["optimizer"])
    for module, its in ((one, optimizer), (other, resumed)):
        train(module, its, 8, first=7)
    for a, b in zip(one.parameters(), other.parameters()):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(resumed.state[b][key])), key
            if torch.is_tensor(value):
                assert value.dtype == resumed.state[b][key].dtype == torch.float32


def test_a_copied_or_pickled_optimizer_goes_on_like_the_original():
    one = model()
    optimizer = BasisRotation(param_groups(one), refresh_period=3)
    train(one, optimizer, 4)
    pairs = [copy.deepcopy((one, optimizer)), pickle.loads(pickle.dumps((one, optimizer)))]
    train(one, optimizer, 4, first=4)
    for other, its in pairs:
        train(other, its, 4, first=4)
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


def test_a_loaded_state_is_a_copy():
    one, other = model(), model()
    optimizer, loaded = BasisRotation(param_groups(one)), BasisRotation(param_groups(other))
    train(one, optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    train(one, optimizer, 3, first=3)
    for p in other.parameters():
        assert loaded.state[p]["step"] == 3
    assert all(
        torch.equal(torch.as_tensor(v), torch.as_tensor(loaded.state_dict()["state"][i][k]))
        for i, s in state["state"].items()
        for k, v in s.items()
    )


@pytest.mark.parametrize(
    "change", [{"geometry": "unilateral"}, {"source": "first_order"}, {"max_dim": 6}, {"rotate": {"exclude": ["2.*"]}}]
)
def test_a_state_of_another_kind_is_refused_and_nothing_is_loaded(change):
    one, other = model(), model()
    optimizer = BasisRotation(param_groups(one))
    train(one, optimizer, 2)
    changed = BasisRotation(param_groups(other), **change)
    with pytest.raises(ValueError, match="saved state of .*resume with"):
        changed.load_state_dict(optimizer.state_dict())
    assert not changed.state


def test_a_state_of_another_shape_is_refused():
    one, other = nn.Linear(4, 4), nn.Linear(4, 5)
    optimizers = BasisRotation(list(one.parameters())), BasisRotation(list(other.parameters()))
    train(one, optimizers[0], 2)
    with pytest.raises(ValueError, match="another model"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())


def test_learning_rate_is_restored_and_the_refresh_period_is_as_configured():
    one, other = model(), model()
    optimizer = BasisRotation(param_groups(one), lr=1e-3, refresh_period=10)
    train(one, optimizer, 2)
    changed = BasisRotation(param_groups(other), lr=1e-2, refresh_period=5)
    changed.load_state_dict(optimizer.state_dict())
    assert {(group["lr"], group["refresh_period"]) for group in changed.param_groups} == {(1e-3, 5)}


def test_groups_have_their_own_options():
    a, b = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    optimizer = BasisRotation([{"params": [a], "lr": 0.0, "weight_decay": 0.0}, {"params": [b], "geometry": "unilateral"}], lr=1e-2)
    a.grad = b.grad = torch.randn(4, 4)
    optimizer.step()
    assert torch.equal(a.detach(), torch.ones(4, 4)) and not torch.equal(b.detach(), torch.ones(4, 4))
    assert "left_basis" in optimizer.state[a] and "left_basis" not in optimizer.state[b]


def test_an_lr_scheduler_drives_it():
    module = model()
    optimizer = BasisRotation(param_groups(module), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))
    for seed in range(3):
        set_gradients(module, seed)
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 / 4] * 2


def test_a_closure_is_evaluated_with_gradients():
    module = model()
    optimizer = BasisRotation(param_groups(module), lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = module(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(10)]
    assert losses[-1] < losses[0]


def test_stagger_spreads_the_refreshes_over_the_period(monkeypatch):
    refreshed = []
    original = StackUpdate.refresh
    monkeypatch.setattr(StackUpdate, "refresh", lambda self, index: (refreshed.append(self.state["step"]), original(self, index)))
    for stagger, at_once in ((True, 1), (False, 4)):
        refreshed.clear()
        parameters = [nn.Parameter(torch.zeros(3, 3)) for _ in range(4)]
        optimizer = BasisRotation(parameters, refresh_period=4, stagger=stagger)
        for _ in range(12):
            for p in parameters:
                p.grad = torch.randn(3, 3)
            optimizer.step()
        counts = [refreshed.count(update) for update in range(5, 13)]
        assert sum(counts) == 8 and max(counts) == at_once


def test_parameters_without_gradient_are_left_alone():
    a, b = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    optimizer = BasisRotation([a, b])
    a.grad = torch.randn(3, 3)
    optimizer.step()
    assert torch.equal(b.detach(), torch.ones(3, 3)) and b not in optimizer.state


def test_all_zero_gradients_before_the_first_real_one_advance_nothing():
    module, control = model(), model()
    optimizers = BasisRotation(param_groups(module)), BasisRotation(param_groups(control))
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizers[0].step()
    assert not optimizers[0].state and all(torch.equal(a, b) for a, b in zip(module.parameters(), control.parameters()))
    for each, its in zip((module, control), optimizers):
        train(each, its, 5)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), control.parameters()))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"refresh_period": 0}, "refresh_period: must be an integer >= 1"),
        ({"refresh_period": 2.5}, "refresh_period"),
        ({"lr": -1.0}, "lr: must be a number >= 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": 0.9}, "betas"),
        ({"geometry": "bilaterall"}, "geometry: .*did you mean 'bilateral'"),
        ({"source": "third_order"}, "source: .*first_order"),
        ({"noise_floor": float("nan")}, "noise_floor"),
        ({"rotate": {"includes": ["x"]}}, "rotate: unknown key 'includes'; did you mean 'include'"),
        ({"rotate": {"include": ["*"]}}, "rotate: include and exclude patterns need names"),
        ({"refresh_allocation": "stage"}, "refresh_allocation"),
    ],
)
def test_an_illegal_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        BasisRotation([nn.Parameter(torch.zeros(2, 2))], **options)


def test_a_misspelt_option_of_a_group_is_named_and_the_user_s_own_keys_are_kept():
    p = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="parameter group: unknown key 'refresh_perid'; did you mean 'refresh_period'?"):
        BasisRotation([{"params": [p], "refresh_perid": 3}])
    assert BasisRotation([{"params": [p], "name": "matrices"}]).param_groups[0]["name"] == "matrices"


def test_the_plain_loop_of_the_documentation_learns():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = BasisRotation(param_groups(module), lr=1e-2)
    x = torch.randn(64, 8)
    y = torch.sin(x[:, :4])
    losses = []
    for _ in range(60):
        loss = nn.functional.mse_loss(module(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("function", ["power_step", "cold_start"])
def test_a_failed_decomposition_keeps_the_last_good_basis_and_the_third_in_a_row_is_an_error(function, monkeypatch, caplog):
    parameter = nn.Parameter(torch.zeros(4, 6))
    optimizer = BasisRotation([("layer.weight", parameter)], refresh_period=2, stagger=False)

    def fail(*_):
        raise torch.linalg.LinAlgError("did not converge")

    if function == "cold_start":
        monkeypatch.setattr(eigenbasis, "cold_start", fail)
    monkeypatch.setattr(eigenbasis, "power_step", fail)
    failures = 0
    for update in range(1, 9):
        parameter.grad = torch.randn(4, 6)
        failures += update % 2 == 0 or (update == 1 and function == "cold_start")
        if failures == 3:
            with pytest.raises(RuntimeError, match=r"basis of layer.weight \[4, 6\] could not be refreshed 3 times in a row"):
                optimizer.step()
            break
        optimizer.step()
        basis = optimizer.state[parameter]["left_basis"]
        torch.testing.assert_close(basis.T @ basis, torch.eye(4), rtol=0, atol=1e-6)
        assert parameter.isfinite().all()
    assert failures == 3 and "did not converge" in caplog.text


def test_a_basis_that_is_not_finite_counts_as_failed(monkeypatch):
    parameter = nn.Parameter(torch.zeros(4, 6))
    optimizer = BasisRotation([parameter], refresh_period=2, stagger=False)
    original = eigenbasis.power_step
    for update in range(1, 7):
        broken = update == 2
        monkeypatch.setattr(
            eigenbasis, "power_step", lambda c, q, d, broken=broken: (q * math.nan, q[0].argsort()) if broken else original(c, q, d)
        )
        parameter.grad = torch.randn(4, 6)
        optimizer.step()
        assert optimizer.state[parameter]["failed_refreshes"] == [int(update in (2, 3))]
    assert parameter.isfinite().all()


def test_complex_parameters_are_refused():
    with pytest.raises(ValueError, match="complex"):
        BasisRotation([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])


def test_float64_weights_keep_their_precision():
    p = nn.Parameter(torch.full((2, 2), 1 + 1e-12, dtype=torch.float64))
    optimizer = BasisRotation([p], lr=1e-10, weight_decay=0.0)
    for _ in range(10):
        p.grad = torch.eye(2, dtype=torch.float64) * 1e200 + 1e200
        optimizer.step()
    moved = 1 + 1e-12 - p.detach()
    assert optimizer.skipped_updates == 0 and 1e-10 < moved.mean() < 1e-8


def test_parameters_exchanged_under_the_optimizer_are_refused():
    p = nn.Parameter(torch.zeros(2, 2))
    optimizer = BasisRotation([p])
    flat = nn.Parameter(torch.zeros(4))
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="needs the whole matrices"):
        optimizer.step()


def test_autocast_around_the_step_does_not_lower_its_precision():
    weights = []
    for enabled in (False, True):
        parameter = nn.Parameter(torch.zeros(6, 4))
        optimizer = BasisRotation([parameter], refresh_period=2)
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            parameter.grad = torch.randn(6, 4, generator=generator)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                optimizer.step()
        weights.append(parameter.detach().clone())
    assert torch.equal(*weights)
