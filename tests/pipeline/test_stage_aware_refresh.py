"""The simulator tells every stage's optimizer about all stages, and the stages' refreshes follow."""

import pytest
import torch
from torch import nn

from ds_basisrot import BasisRotation, param_groups
from ds_basisrot.optim.rotated_adam import StackUpdate
from ds_basisrot.pipeline.simulator import PipelineSimulator

STAGES, PERIOD = 3, 4


class Sharing(torch.optim.SGD):
    """An optimizer that shares refreshes, and is none of ours."""

    told = None

    def __init__(self, parameters, cost):
        super().__init__(parameters, lr=0.1)
        self.cost = cost

    def refresh_cost(self):
        return self.cost

    def share_refreshes(self, staleness, costs, stage):
        self.told = list(staleness), list(costs), stage


def stages(number=STAGES):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()) for _ in range(number)]


def data(updates, start=0):
    generators = [torch.Generator().manual_seed(i) for i in range(start, start + updates)]
    return [[(torch.randn(4, 6, generator=g), torch.randn(4, 6, generator=g))] for g in generators]


def simulator(modules, allocation, accumulation=1):
    optimizers = [
        BasisRotation(param_groups(m, holds_output=False), lr=1e-2, refresh_period=PERIOD, refresh_allocation=allocation) for m in modules
    ]
    return PipelineSimulator(modules, nn.functional.mse_loss, optimizers, accumulation=accumulation)


def weights(modules):
    return torch.cat([p.detach().flatten() for m in modules for p in m.parameters()])


@pytest.mark.parametrize("accumulation, staleness", [(1, [2, 1, 0]), (2, [1, 0.5, 0]), (3, [2 / 3, 1 / 3, 0])])
def test_an_optimizer_learns_the_staleness_in_updates_and_the_costs_of_all_stages(accumulation, staleness):
    modules = stages()
    optimizers = [Sharing(modules[0].parameters(), 5), torch.optim.SGD(modules[1].parameters()), Sharing(modules[2].parameters(), 7)]
    PipelineSimulator(modules, nn.functional.mse_loss, optimizers, accumulation=accumulation)
    for stage in (0, 2):
        assert optimizers[stage].told == (pytest.approx(staleness), [5, 0, 7], stage)


@pytest.mark.parametrize(
    "allocation, rates", [("uniform", (1, 1, 1)), ("stage_aware", (3 / 2, 1, 1 / 2)), ("inverse", (6 / 11, 9 / 11, 18 / 11))]
)
def test_stages_refresh_as_often_as_their_staleness_asks_for(monkeypatch, allocation, rates):
    counts, original = {}, StackUpdate.refresh

    def counting(self, *args, **kwargs):
        counts[id(self.state)] = counts.get(id(self.state), 0) + 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(StackUpdate, "refresh", counting)
    modules = stages()
    run = simulator(modules, allocation)
    for batch in data(49):
        run.train_batch([batch])
    for module, optimizer, rate in zip(modules, run.optimizers, rates):
        for p in (module[0].weight, module[2].weight):
            assert abs(counts[id(optimizer.state[p])] - 48 * rate / PERIOD) <= 1


def test_allocations_train_differently():
    results = []
    for allocation in ("uniform", "stage_aware", "inverse"):
        modules = stages()
        run = simulator(modules, allocation)
        for batch in data(8):
            run.train_batch([batch])
        results.append(weights(modules))
    assert not any(torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


@pytest.mark.parametrize("allocation", ["stage_aware", "inverse"])
def test_a_resumed_run_is_bitwise_the_run_that_went_on(allocation):
    ours, theirs = stages(), stages()
    run = simulator(ours, allocation)
    for batch in data(7):
        run.train_batch([batch])
    run.cut()
    for source, target in zip(ours, theirs):
        target.load_state_dict(source.state_dict())
    resumed = simulator(theirs, allocation)
    for source, target in zip(run.optimizers, resumed.optimizers):
        target.load_state_dict(source.state_dict())
    for batch in data(9, start=7):
        assert run.train_batch([batch]) == resumed.train_batch([batch])
    assert torch.equal(weights(ours), weights(theirs))
