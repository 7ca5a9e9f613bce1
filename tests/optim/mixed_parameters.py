"""Parameters of every kind in one optimizer, with gradients that depend on a seed alone, and comparisons bit by bit."""

import copy

import torch
from torch import nn

from ds_basisrot import BasisRotation

FUSED_LAYOUT = {"rows": [4, 2, 2], "names": ["q", "k", "v"]}
KINDS = {
    "matrix": ((6, 9), True),
    "vector": ((9,), False),
    "scalar": ((), False),
    "stack": ((3, 4, 5), True),
    "fused": ((8, 5), FUSED_LAYOUT),
}
"""Kind of a parameter: its shape, and its entry in `rotate`."""


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def build(dtype=torch.float32, kinds=tuple(KINDS), **options):
    """Parameters by kind, and their optimizer."""
    parameters = {kind: nn.Parameter(random(*KINDS[kind][0], seed=9, dtype=dtype)) for kind in kinds}
    group = {"params": list(parameters.items()), "rotate": [KINDS[kind][1] for kind in kinds]}
    return parameters, BasisRotation([group], **{"lr": 1e-2, "refresh_period": 3} | options)


def set_gradients(parameters, seed, scale=1.0):
    for index, p in enumerate(parameters.values()):
        p.grad = scale * random(*p.shape, seed=1000 * index + seed, dtype=p.dtype)


def train(parameters, optimizer, seeds, scale=1.0):
    """One update for each seed."""
    for seed in seeds:
        set_gradients(parameters, seed, scale)
        optimizer.step()


def snapshot(parameters, optimizer):
    """Copies of weights and of states, by kind."""
    return copy.deepcopy({kind: (p.detach(), dict(optimizer.state.get(p, {}))) for kind, p in parameters.items()})


def assert_same(one, other):
    """Two snapshots are bitwise equal, with equal dtypes and types."""
    for kind, (weight, state) in one.items():
        assert torch.equal(weight, other[kind][0]), kind
        assert state.keys() == other[kind][1].keys()
        for key, value in state.items():
            its = other[kind][1][key]
            assert type(value) is type(its), (kind, key)
            assert value.dtype == its.dtype and torch.equal(value, its) if torch.is_tensor(value) else value == its, (kind, key)


def loss_of_orthogonality(basis):
    basis = basis.double()
    return (basis.mT @ basis - torch.eye(basis.shape[-1], dtype=torch.float64)).abs().amax().item()
