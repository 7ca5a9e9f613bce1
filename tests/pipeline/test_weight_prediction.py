"""Predicted changes of weights against steps that torch's own optimizers really make, in double precision."""

import copy

import pytest
import torch
from torch import nn

from ds_basisrot.pipeline import weight_prediction
from ds_basisrot.pipeline.weight_prediction import check, predicted_changes

SHAPES = ((5, 4), (7,), (), (2, 3, 2))


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(kind, updates=5, dtype=torch.float32, **options):
    """Parameters in two groups with an optimizer that has updated them; the last parameter has missed two updates."""
    parameters = [nn.Parameter(random(shape, seed).to(dtype)) for seed, shape in enumerate(SHAPES)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 3e-2, "betas": (0.7, 0.98)}]
    optimizer = kind(groups, **{"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-3} | options)
    for update in range(updates):
        for seed, p in enumerate(parameters):
            p.grad = random(p.shape, 100 * update + seed).to(dtype)
        if update < 2:
            parameters[-1].grad = None
        optimizer.step()
    return parameters, optimizer


def really_stepped(parameters, optimizer, updates):
    """What copies change by in updates of zero gradients, which leave the second moments as they are."""
    parameters, optimizer = copy.deepcopy((parameters, optimizer))
    for p in parameters:
        p.data = p.data.double()
        p.grad = None if p not in optimizer.state else torch.zeros_like(p)
        for key in ("exp_avg", "exp_avg_sq"):
            if p in optimizer.state:
                optimizer.state[p][key] = optimizer.state[p][key].double()
    before = [p.detach().clone() for p in parameters]
    for _ in range(updates):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
            for p in group["params"]:
                if p in optimizer.state:
                    optimizer.state[p]["exp_avg_sq"] /= group["betas"][1]
        optimizer.step()
    return [(p - b).detach() for p, b in zip(parameters, before)]


def assert_close(changes, parameters, expected):
    for p, change in zip(parameters, expected):
        assert changes[p].shape == p.shape and changes[p].dtype == torch.float32
        torch.testing.assert_close(changes[p].double(), change, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("updates", [1, 2, 7])
@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"weight_decay": 0.3, "maximize": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"lr": torch.tensor(2e-2), "foreach": False}),
        (torch.optim.Adam, {"weight_decay": 0.3, "eps": 1e-8}),
    ],
)
def test_adam_goes_where_it_is_predicted_to_go(kind, options, updates):
    parameters, optimizer = trained(kind, **options)
    assert_close(predicted_changes(optimizer, updates), parameters, really_stepped(parameters, optimizer, updates))


@pytest.mark.parametrize("updates", [1, 3])
def test_the_sum_is_the_formula(updates):
    (p, *_), optimizer = trained(torch.optim.AdamW, updates=4)
    m, v = (optimizer.state[p][key].double() for key in ("exp_avg", "exp_avg_sq"))
    expected = 0.0
    for s in range(1, updates + 1):
        expected -= 1e-2 * (0.9**s * m / (1 - 0.9 ** (4 + s))) / ((v / (1 - 0.99 ** (4 + s))).sqrt() + 1e-3)
    torch.testing.assert_close(predicted_changes(optimizer, updates)[p].double(), expected, rtol=1e-5, atol=1e-12)


def test_parameters_in_batches_are_predicted_bitwise_as_alone(monkeypatch):
    _, optimizer = trained(torch.optim.AdamW)
    together = predicted_changes(optimizer, 4)
    monkeypatch.setattr(weight_prediction, "LARGEST_BATCH", 8)
    alone = predicted_changes(optimizer, 4)
    assert len(alone) == len(SHAPES) and all(torch.equal(together[p], change) for p, change in alone.items())


def test_nothing_changes_by_predicting():
    parameters, optimizer = trained(torch.optim.AdamW)
    kept_parameters, kept = copy.deepcopy((parameters, optimizer))
    for change in predicted_changes(optimizer, 3).values():
        change.fill_(7.0)
    for p, its in zip(parameters, kept_parameters):
        assert torch.equal(p, its)
        assert all(torch.equal(optimizer.state[p][key], kept.state[its][key]) for key in optimizer.state[p])


def test_nothing_is_predicted_before_there_is_a_state_nor_for_no_updates():
    parameters, optimizer = trained(torch.optim.AdamW, updates=0)
    assert predicted_changes(optimizer, 3) == {} and not optimizer.state
    parameters, optimizer = trained(torch.optim.AdamW, updates=1)  # in which the last one has no gradient
    assert set(predicted_changes(optimizer, 3)) == set(parameters[:-1])
    assert not any(change.any() for change in predicted_changes(optimizer, 0).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_weights_of_other_precisions_get_float32_changes(dtype):
    parameters, optimizer = trained(torch.optim.AdamW, dtype=dtype)
    assert_close(predicted_changes(optimizer, 2), parameters, really_stepped(parameters, optimizer, 2))


class FusedAdam(torch.optim.Adam):
    """Counts like DeepSpeed's: in the state of the last parameter of a group that has a gradient."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"][:-1]:
                self.state[p]["step"] = 0


class GroupCountingAdam(torch.optim.Adam):
    """Counts in its groups, as some fused ones do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["step"] = 5
            for p in group["params"]:
                del self.state[p]["step"]


@pytest.mark.parametrize("kind", [FusedAdam, GroupCountingAdam])
@pytest.mark.parametrize("corrected", [True, False])
def test_adams_that_count_elsewhere_are_understood(kind, corrected):
    one, two = (nn.Parameter(random((3,), seed)) for seed in range(2))
    optimizer = kind([one, two], lr=1e-2, betas=(0.9, 0.99), eps=1e-3)
    optimizer.param_groups[0]["bias_correction"] = corrected
    for p in (one, two):
        optimizer.state[p] = {"step": torch.tensor(4.0), "exp_avg": random((3,), 5), "exp_avg_sq": random((3,), 6).square()}
        p.grad = random((3,), 7)
    optimizer.step()
    changes = predicted_changes(optimizer, 1)
    m, v = (optimizer.state[one][key].double() for key in ("exp_avg", "exp_avg_sq"))
    first, second = (1 - 0.9**6, 1 - 0.99**6) if corrected else (1.0, 1.0)
    expected = -1e-2 * (0.9 * m / first) / ((v / second).sqrt() + 1e-3)
    for p in (one, two):
        torch.testing.assert_close(changes[p].double(), expected, rtol=1e-5, atol=1e-12)


def test_an_optimizer_that_predicts_by_itself_is_asked():
    class Own(torch.optim.SGD):
        def predicted_changes(self, updates):
            return {self.param_groups[0]["params"][0]: torch.tensor(float(updates))}

    p = nn.Parameter(torch.zeros(()))
    check(Own([p]))
    assert predicted_changes(Own([p]), 3)[p].item() == 3.0


def test_adams_are_accepted_by_whatever_name_they_derive_from():
    class Mine(torch.optim.AdamW):
        pass

    class DeepSpeedCPUAdam(torch.optim.Optimizer):
        pass

    for kind in (torch.optim.Adam, torch.optim.AdamW, Mine, FusedAdam):
        check(kind([nn.Parameter(torch.zeros(2))]))
    check(DeepSpeedCPUAdam([nn.Parameter(torch.zeros(2))], {}))


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "SGD", "Adamax", "Adagrad"])
def test_other_optimizers_are_refused_also_where_their_states_look_like_adams(name):
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.zeros(2))], lr=0.1)
    for refusing in (check, lambda it: predicted_changes(it, 1)):
        with pytest.raises(ValueError, match=rf"^pipeline\.weight_prediction: needs Adam, AdamW or BasisRotation, got {name}$"):
            refusing(optimizer)


def test_amsgrad_is_refused_in_any_group():
    groups = [{"params": [nn.Parameter(torch.zeros(2))]}, {"params": [nn.Parameter(torch.zeros(2))], "amsgrad": True}]
    with pytest.raises(ValueError, match=r"^pipeline\.weight_prediction: does not go with Adam's amsgrad"):
        check(torch.optim.AdamW(groups))


def test_a_negative_number_of_updates_is_refused():
    with pytest.raises(ValueError, match="updates: must be >= 0, got -1"):
        predicted_changes(torch.optim.Adam([nn.Parameter(torch.zeros(2))]), -1)
