"""Experts and parts of fused weights whose gradients come late start with them, and leave the others alone."""

import pytest
import torch
from mixed_parameters import build, loss_of_orthogonality, random
from torch import nn

from ds_basisrot import BasisRotation
from ds_basisrot.optim import eigenbasis
from ds_basisrot.optim.rotated_adam import StackUpdate


@pytest.mark.parametrize("source", eigenbasis.SOURCES)
def test_an_expert_whose_gradients_come_late_has_its_first_basis_from_them_and_disturbs_no_other(source, monkeypatch):
    begun, original = [], eigenbasis.cold_start
    monkeypatch.setattr(eigenbasis, "cold_start", lambda gradient, *rest: (begun.append(gradient.clone()), original(gradient, *rest))[1])
    stack, others = nn.Parameter(random(3, 4, 5)), nn.Parameter(random(2, 4, 5))
    with torch.no_grad():
        others.copy_(stack[[0, 2]])
    options = {"lr": 1e-2, "refresh_period": 3, "source": source, "stagger": False}
    optimizers = [BasisRotation([{"params": [p], "rotate": True}], **options) for p in (stack, others)]
    first = random(4, 5, seed=77)
    for t in range(1, 13):
        stack.grad = random(3, 4, 5, seed=t)
        stack.grad[1] *= t >= 6  # a refresh of the others is due
        if t == 6:
            stack.grad[1] = first
        others.grad = stack.grad[[0, 2]].clone()
        begun.clear()
        optimizers[0].step()
        state = optimizers[0].state[stack]
        assert state["cold"] == ([1] if t < 6 else [])
        if t < 6:
            assert torch.equal(state["left_basis"][1], torch.eye(4))
        if t == 6:
            assert len(begun) == 1 and torch.equal(begun[0], first)
            left, right = original(first, True, True, eigenbasis.cold_tolerance(0.01, torch.float32))
            assert torch.equal(state["left_basis"][1], left) and torch.equal(state["right_basis"][1], right)
        optimizers[1].step()
    torch.testing.assert_close(stack[[0, 2]], others, rtol=0, atol=1e-6)
    assert loss_of_orthogonality(state["left_basis"][1]) <= 1e-4 and not torch.equal(state["left_basis"][1], left)


def test_a_part_of_a_fused_weight_whose_gradients_come_late_is_refreshed_from_then_on(monkeypatch):
    refreshed, original = [], StackUpdate.refresh
    monkeypatch.setattr(
        StackUpdate, "refresh", lambda self, index: (refreshed.append((self.state["step"], self.stack.part.name)), original(self, index))
    )
    parameters, optimizer = build(kinds=("fused",), stagger=False)
    for t in range(1, 10):
        p = parameters["fused"]
        p.grad = random(8, 5, seed=t)
        p.grad[6:] *= t >= 5  # v
        optimizer.step()
        assert optimizer.state[p]["v.cold"] == ([0] if t < 5 else [])
    assert refreshed == [(3, "q"), (3, "k"), (6, "q"), (6, "k"), (6, "v"), (9, "q"), (9, "k"), (9, "v")]


def test_a_part_that_is_not_rotated_costs_no_decomposition(monkeypatch):
    """Of a fused weight one part may be a single row, or longer than `max_dim`."""
    shapes, original = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda a: (shapes.append(tuple(a.shape)), original(a))[1])
    p = nn.Parameter(random(30, 40))
    optimizer = BasisRotation([{"params": [p], "rotate": [{"rows": [24, 6]}]}], max_dim=10)
    for seed in range(3):
        p.grad = random(30, 40, seed=seed)
        optimizer.step()
    assert shapes == [(6, 6)] and p.isfinite().all()
