"""The simulator against the method's definition, written out by hand."""

import pytest
import torch
from torch import nn

from ds_basisrot.pipeline.simulator import PipelineSimulator


def stages(number):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(number)]


def data(updates, accumulation, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        [(torch.randn(4, 3, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(accumulation)]
        for _ in range(updates)
    ]


def sgd(modules, lr=0.1):
    return [torch.optim.SGD(m.parameters(), lr=lr) for m in modules]


def weights(modules):
    return torch.cat([p.detach().flatten() for m in modules for p in m.parameters()])


def test_one_stage_is_ordinary_training():
    ours, theirs = stages(1), stages(1)
    simulator = PipelineSimulator(ours, nn.functional.mse_loss, sgd(ours), accumulation=2)
    (optimizer,) = sgd(theirs)
    for batch in data(5, 2):
        loss = simulator.train_batch([batch])
        optimizer.zero_grad()
        expected = sum(nn.functional.mse_loss(theirs[0](x), y) for x, y in batch) / 2
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=1e-7)


@pytest.mark.parametrize("stashing", [True, False])
def test_two_stages_by_hand(stashing):
    """w_0 of stage 0 is one update old when microbatch t >= 1 is forwarded; the last stage is up to date."""
    ours, (first, last) = stages(2), stages(2)
    simulator = PipelineSimulator(ours, nn.functional.mse_loss, sgd(ours), weight_stashing=stashing)
    lr, history = 0.1, []
    for t, batch in enumerate(data(6, 1)):
        simulator.train_batch([batch])
        ((x, y),) = batch
        history.append([p.detach().clone() for p in first.parameters()])
        then = history[max(0, t - 1)]
        weight, bias = (p.clone().requires_grad_() for p in then)
        newest = history[t]
        hidden = torch.tanh(x @ weight.T + bias)
        loss = nn.functional.mse_loss(last(hidden), y)
        gradients = torch.autograd.grad(loss, [weight, bias, *last.parameters()])
        with torch.no_grad():  # stage 0's own weights do not enter their own gradient: stashing or not is the same here
            for p, now, g in zip(first.parameters(), newest, gradients[:2]):
                p.copy_(now - lr * g)
            for p, g in zip(last.parameters(), gradients[2:]):
                p.sub_(lr * g)
    torch.testing.assert_close(weights(ours), weights([first, last]), rtol=0, atol=1e-6)


def test_without_stashing_the_gradient_of_a_deeper_stage_sees_the_newest_weights():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([2.0]))

        def forward(self, x):
            return self.w * (self.w * x)

    results = {}
    for stashing in (True, False):
        modules = [Twice(), nn.Identity()]
        modules[1].scale = nn.Parameter(torch.tensor([1.0]))
        simulator = PipelineSimulator(modules, lambda out, _: out.sum(), sgd(modules, lr=0.25), weight_stashing=stashing)
        for _ in range(2):
            simulator.train_batch([[(torch.tensor([1.0]), None)]])
        results[stashing] = modules[0].w.item()
    # update 1: w = 2 - 0.25 * 2 * 2 = 1. Update 2 forwards on 2: inner saved activation 2 * x = 2.
    assert results[True] == 1 - 0.25 * (2 + 2)  # d/dw of w^2 at the forward's 2
    assert results[False] == 1 - 0.25 * (2 + 1)  # the saved activation 2, and the newest weight 1


def test_a_cut_forwards_again_with_the_present_weights():
    plain, cut, fresh = stages(3), stages(3), stages(3)
    simulators = [PipelineSimulator(m, nn.functional.mse_loss, sgd(m)) for m in (plain, cut)]
    batches = data(8, 1)
    for batch in batches[:4]:
        for simulator in simulators:
            simulator.train_batch([batch])
    simulators[1].cut()
    for source, target in zip(cut, fresh):
        target.load_state_dict(source.state_dict())
    simulators.append(PipelineSimulator(fresh, nn.functional.mse_loss, sgd(fresh)))
    for batch in batches[4:]:
        for simulator in simulators:
            simulator.train_batch([batch])
    assert torch.equal(weights(cut), weights(fresh)) and not torch.equal(weights(cut), weights(plain))


def test_replicas_average_their_gradients():
    one, two = stages(2), stages(2)
    simulators = [PipelineSimulator(m, nn.functional.mse_loss, sgd(m)) for m in (one, two)]
    for a, b in zip(data(5, 1, seed=1), data(5, 1, seed=2)):
        together = [(torch.cat([a[0][i], b[0][i]])) for i in range(2)]
        losses = [simulators[0].train_batch([[tuple(together)]]), simulators[1].train_batch([a, b])]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(weights(one), weights(two), rtol=0, atol=1e-6)


def test_clipping_by_stage_is_by_each_stage_s_own_norm():
    modules = stages(2)
    simulator = PipelineSimulator(modules, nn.functional.mse_loss, sgd(modules, lr=1.0), max_grad_norm=1e-3, clip_scope="stage")
    for batch in data(2, 1):
        before = [weights([m]) for m in modules]
        simulator.train_batch([batch])
        for m, b in zip(modules, before):
            assert (weights([m]) - b).norm().item() == pytest.approx(1e-3, rel=1e-3)


class Counting(nn.Module):
    """A stage whose weight is the number of updates made, under SGD with a learning rate of 1; it notes what its forwards see."""

    def __init__(self):
        super().__init__()
        self.w, self.seen = nn.Parameter(torch.zeros(())), []

    def forward(self, x):
        self.seen.append(round(self.w.item()))
        return x - self.w


def test_versions_are_those_that_a_stage_had_when_it_had_trained_so_many_microbatches():
    modules = [Counting() for _ in range(3)]
    simulator = PipelineSimulator(modules, lambda out, _: out, sgd(modules, lr=1.0))
    for accumulation, updates in ((1, 4), (3, 2), (2, 2)):
        simulator.set_accumulation(accumulation)
        for _ in range(updates):
            simulator.train_batch([[(torch.zeros(()), None)] * accumulation])
    assert (simulator.updates, simulator.trained) == (8, 14)
    # Updates 0 to 3 end at microbatches 1 to 4, updates 4 and 5 at 7 and 10, updates 6 and 7 at 12 and 14. Cuts at 4 and at 10.
    assert modules[0].seen == [0, 0, 0, 1] + [4, 4, 4] + [4, 4, 5] + [6, 6] + [6, 6]
    assert modules[1].seen == [0, 0, 1, 2] + [4, 4, 4] + [4, 5, 5] + [6, 6] + [6, 7]
    assert modules[2].seen == [0, 1, 2, 3] + [4, 4, 4] + [5, 5, 5] + [6, 6] + [7, 7]


def test_another_accumulation_is_a_cut_and_a_fresh_pipeline():
    changed, fresh = stages(3), stages(3)
    simulator = PipelineSimulator(changed, nn.functional.mse_loss, sgd(changed))
    for batch in data(4, 1):
        simulator.train_batch([batch])
    simulator.set_accumulation(2)
    for source, target in zip(changed, fresh):
        target.load_state_dict(source.state_dict())
    other = PipelineSimulator(fresh, nn.functional.mse_loss, sgd(fresh), accumulation=2)
    for batch in data(4, 2, seed=1):
        assert simulator.train_batch([batch]) == other.train_batch([batch])
    assert torch.equal(weights(changed), weights(fresh))


def test_optimizers_are_told_the_staleness_again_when_the_accumulation_changes():
    class Sharing(torch.optim.SGD):
        def refresh_cost(self):
            return 1

        def share_refreshes(self, staleness, costs, stage):
            self.told = staleness, costs, stage

    modules = stages(3)
    simulator = PipelineSimulator(modules, nn.functional.mse_loss, [Sharing(m.parameters(), lr=0.1) for m in modules])
    simulator.set_accumulation(2)
    assert [o.told for o in simulator.optimizers] == [([1, 0.5, 0], [1, 1, 1], k) for k in range(3)]


def test_microbatches_of_one_update_may_have_different_shapes():
    ours, theirs = stages(1), stages(1)
    simulator = PipelineSimulator(ours, nn.functional.mse_loss, sgd(ours), accumulation=2)
    (optimizer,) = sgd(theirs)
    for (x, y), (z, t) in data(3, 2):
        batch = [(x[:1], y[:1]), (z.expand(2, 4, 3), t.expand(2, 4, 3))]
        loss = simulator.train_batch([batch])
        optimizer.zero_grad()
        expected = sum(nn.functional.mse_loss(theirs[0](a), b) for a, b in batch) / 2
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=1e-6)


def test_wrong_sizes_are_named():
    modules = stages(2)
    with pytest.raises(ValueError, match="one optimizer per stage, got 2 and 1"):
        PipelineSimulator(modules, nn.functional.mse_loss, sgd(modules)[:1])
    with pytest.raises(ValueError, match="needs 2 microbatches"):
        PipelineSimulator(modules, nn.functional.mse_loss, sgd(modules), accumulation=2).train_batch(data(1, 1))
    with pytest.raises(ValueError, match="accumulation: must be >= 1, got 0"):
        PipelineSimulator(modules, nn.functional.mse_loss, sgd(modules)).set_accumulation(0)
