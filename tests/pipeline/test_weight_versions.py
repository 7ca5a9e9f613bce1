"""Weight stashing: a microbatch's forward and backward see one version, whatever is updated in between."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from ds_basisrot.pipeline.weight_versions import WeightVersions


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def update(versions, parameters, value):
    with torch.no_grad():
        for p in parameters:
            p.add_(value)
    versions.changed()


def gradient_of_output(net, x):
    x = x.clone().requires_grad_()
    net(x).square().sum().backward()
    return x.grad


@pytest.mark.parametrize("stashing", [True, False])
def test_backward_sees_the_version_of_the_forward_or_the_newest(stashing):
    net, x = module(), torch.ones(2, 3)
    then = {name: p.detach().clone() for name, p in net.named_parameters()}
    versions = WeightVersions(net.parameters(), stashing)
    leaf = x.clone().requires_grad_()
    with versions.forward(0):
        output = net(leaf)
    update(versions, list(net.parameters()), 0.5)
    with versions.backward(0):
        output.square().sum().backward()
    reference = module()
    reference.load_state_dict(then)
    exact = gradient_of_output(reference, x)
    assert torch.equal(leaf.grad, exact) is stashing


def test_live_weights_never_move_and_are_the_newest():
    net = module()
    storages = [p.data_ptr() for p in net.parameters()]
    versions = WeightVersions(net.parameters(), True)
    for m in range(4):
        with versions.forward(m):
            assert all(p.data_ptr() != s for p, s in zip(net.parameters(), storages))
        update(versions, list(net.parameters()), 1.0)
    assert [p.data_ptr() for p in net.parameters()] == storages
    assert net[0].bias.detach().mean() > 3


@pytest.mark.parametrize("accumulation", [1, 3])
def test_weights_are_written_once_more_in_each_update_and_never_for_a_single_microbatch(monkeypatch, accumulation):
    net, copies, outputs = module(), [], {}
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, source: (copies.append(len(to)), copy(to, source)))
    versions = WeightVersions(net.parameters(), True)
    for u in range(5):
        versions.prepare()
        for m in range(u * accumulation, (u + 1) * accumulation):
            with versions.forward(m):
                outputs[m] = net(torch.ones(2, 3))
            if m >= 2:
                with versions.backward(m - 2):
                    outputs.pop(m - 2).sum().backward()
        update(versions, list(net.parameters()), 0.1)
    assert len(copies) == 5 and set(copies) == {len(list(net.parameters()))}


def test_one_snapshot_for_each_version_in_flight_and_no_more():
    net = module()
    size = sum(p.numel() * p.element_size() for p in net.parameters())
    versions = WeightVersions(net.parameters(), True)
    for m in range(3):  # three forwards of one version
        with versions.forward(m):
            net(torch.ones(1, 3))
    assert versions.alive == 1
    for m in range(3, 40):  # then one forward, one backward and one update in turn
        with versions.forward(m):
            pass
        with versions.backward(m - 3):
            pass
        update(versions, list(net.parameters()), 0.1)
    assert versions.alive == 3 and versions.stash_bytes == 4 * size


def test_dropped_microbatches_free_their_snapshots():
    net = module()
    versions = WeightVersions(net.parameters(), True)
    for m in range(3):
        with versions.forward(m):
            pass
        update(versions, list(net.parameters()), 0.1)
    assert versions.alive == 3
    before = versions.stash_bytes
    versions.drop()
    assert versions.alive == 0
    for m in range(3):
        with versions.forward(m):
            pass
        update(versions, list(net.parameters()), 0.1)
    assert versions.stash_bytes == before


def test_the_swap_is_undone_when_the_forward_raises():
    net = module()
    storages = [p.data_ptr() for p in net.parameters()]
    versions = WeightVersions(net.parameters(), True)
    with pytest.raises(ZeroDivisionError), versions.forward(0):
        raise ZeroDivisionError
    assert [p.data_ptr() for p in net.parameters()] == storages


def test_nothing_to_train_is_nothing_to_stash():
    versions = WeightVersions([], True)
    with versions.forward(0):
        pass
    versions.changed()
    with versions.backward(0):
        pass
    assert versions.stash_bytes == 0


def test_weights_changed_in_place_by_others_do_not_stop_the_backward_of_the_stashed_version():
    net, x = module(), torch.ones(2, 3)
    versions = WeightVersions(net.parameters(), True)
    leaf = x.clone().requires_grad_()
    with versions.forward(0):
        output = net(leaf)
    (expected,) = torch.autograd.grad(output.square().sum(), leaf, retain_graph=True)
    with torch.no_grad():
        net[0].weight.clamp_(-0.1, 0.1)  # a user's own change between two calls
    with versions.backward(0):
        output.square().sum().backward()
    assert torch.equal(leaf.grad, expected)


def test_recomputation_under_autocast_sees_the_snapshot():
    """Autocast caches its copies of weights until its outermost context ends, which may be around many microbatches."""
    gradients = []
    for recompute in (False, True):
        net, leaf = module(), torch.ones(2, 3, requires_grad=True)
        versions = WeightVersions(net.parameters(), True)
        with torch.autocast("cpu", torch.bfloat16), versions.forward(0):
            output = torch.utils.checkpoint.checkpoint(net, leaf, use_reentrant=False) if recompute else net(leaf)
        update(versions, list(net.parameters()), 0.5)
        with torch.autocast("cpu", torch.bfloat16):
            with versions.forward(1):
                net(torch.ones(2, 3))
            with versions.backward(0):
                output.float().square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
