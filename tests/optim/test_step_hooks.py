"""Whoever observes the optimizer's steps, through torch's hooks or its profiler, sees them as those of torch's own optimizers."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from ds_basisrot import BasisRotation


@pytest.fixture
def optimizer():
    p = nn.Parameter(torch.zeros(3, 4))
    p.grad = torch.ones(3, 4)
    return BasisRotation([p])


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_run_once_around_a_step(optimizer, everywhere):
    p, seen = optimizer.param_groups[0]["params"][0], []

    def look(when):
        return lambda its, args, kwargs: seen.append((when, its is optimizer, p.detach().any().item()))

    if everywhere:
        handles = register_optimizer_step_pre_hook(look("before")), register_optimizer_step_post_hook(look("after"))
    else:
        handles = optimizer.register_step_pre_hook(look("before")), optimizer.register_step_post_hook(look("after"))
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [("before", True, False), ("after", True, True)]
    optimizer.step()
    assert len(seen) == 2


@pytest.mark.parametrize("named", [False, True])
def test_a_hook_may_change_the_arguments(optimizer, named):
    def give_closure(its, args, kwargs):
        assert (args, kwargs) == ((its,), {})
        return (args, {"closure": lambda: 7}) if named else ((its, lambda: 7), {})

    optimizer.register_step_pre_hook(give_closure)
    assert optimizer.step() == 7


def test_hooks_run_once_around_the_step_of_a_subclass():
    class Counted(BasisRotation):
        def step(self, closure=None):
            seen.append("step")
            return super().step(closure)

    seen, p = [], nn.Parameter(torch.zeros(3, 4))
    p.grad = torch.ones(3, 4)
    optimizer = Counted([p])
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["before", "step", "after"] and p.detach().all()


def test_a_profiler_names_the_step(optimizer):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        optimizer.step()
    assert [event.name for event in seen.events()].count("Optimizer.step#BasisRotation.step") == 1


def test_a_closure_has_gradients_and_the_update_has_none(optimizer):
    p = optimizer.param_groups[0]["params"][0]

    def closure():
        loss = (p - 1).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 12.0
    assert p.requires_grad and p.is_leaf and p.detach().all()


def test_a_scheduler_counts_the_steps(optimizer):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step()
    scheduler.step()
