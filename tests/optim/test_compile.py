"""What an accelerator does in an update is one graph to torch.compile: no branch on a tensor's value, no read by the host."""

import copy

import torch
from torch import nn

from ds_basisrot import BasisRotation
from ds_basisrot.optim import eigenbasis, orthonormal, rotated_adam
from ds_basisrot.optim.gradient_gate import Gate
from ds_basisrot.optim.rotated_adam import StackUpdate


def test_an_update_with_a_refresh_is_one_graph(monkeypatch):
    monkeypatch.setattr(eigenbasis, "orthonormalise", orthonormal.householder)  # as on an accelerator
    monkeypatch.setattr(rotated_adam, "_check_finite", lambda bases: None)
    parameter = nn.Parameter(torch.randn(150, 40))
    optimizer = BasisRotation([parameter])
    for _ in range(3):
        parameter.grad = torch.randn(150, 40)
        optimizer.step()
    stack, group, gradient = optimizer._plan[parameter].stacks[0], optimizer.param_groups[0], torch.randn(150, 40)

    def update(state, gradient, flag):
        one = StackUpdate(stack, state, group, Gate(flag), torch.float32)
        gradient = one.gate.gradient(gradient)
        one.accumulate(gradient)
        one.refresh(0)
        return one.direction(gradient)[0]

    compiled = torch.compile(update, backend="eager", fullgraph=True)
    for flag in (True, False):
        expected_state, state = (copy.deepcopy(optimizer.state[parameter]) for _ in range(2))
        with torch.no_grad():
            expected = update(expected_state, gradient, torch.tensor(flag))
            direction = compiled(state, gradient, torch.tensor(flag))
        torch.testing.assert_close(direction, expected)
        torch.testing.assert_close(state, expected_state)
        assert all(torch.equal(state[key], optimizer.state[parameter][key]) for key in state if torch.is_tensor(state[key])) is not flag
