"""Pipelines whose gradients are known beforehand, so that what a simulator does with them can be worked out by hand."""

import torch
from torch import nn

from ds_basisrot.pipeline.simulator import PipelineSimulator


class Prescribed(nn.Module):
    """A stage whose gradients are part of the microbatch, whatever its weights: c[k] is the gradient of `w`, d[k] that of `b`."""

    def __init__(self, stage, dtype=torch.float32):
        super().__init__()
        self.stage = stage
        self.w, self.b = (nn.Parameter(torch.zeros((), dtype=dtype)) for _ in range(2))

    def forward(self, inputs):
        c, d, total = inputs
        return c, d, total + c[self.stage] * self.w + d[self.stage] * self.b


class Square(nn.Module):
    """A stage whose gradient is its weight; it notes the weights that its forwards see."""

    def __init__(self, w):
        super().__init__()
        self.w, self.seen = nn.Parameter(torch.tensor(float(w))), []

    def forward(self, x):
        self.seen.append(self.w.item())
        return x + self.w.square() / 2


def microbatch(c, d=None, dtype=torch.float32):
    d = [0] * len(c) if d is None else d
    return (torch.tensor(c, dtype=dtype), torch.tensor(d, dtype=dtype), torch.zeros((), dtype=dtype)), None


def sgd(modules, lr=1.0):
    return [torch.optim.SGD(m.parameters(), lr=lr) for m in modules]


def prescribed(stages, **options):
    modules = [Prescribed(k) for k in range(stages)]
    return modules, PipelineSimulator(modules, lambda out, _: out[2], sgd(modules), **options)


def squares(weights, lr=0.25, **options):
    modules = [Square(w) for w in weights]
    return modules, PipelineSimulator(modules, lambda out, _: out, sgd(modules, lr), **options)


def train(simulator, *microbatches):
    return simulator.train_batch([microbatches])


def movement(modules, name="w"):
    """What an update does to the weights of all stages: the applied gradients, as the learning rate is 1."""
    before = [getattr(m, name).item() for m in modules]
    return lambda: [b - getattr(m, name).item() for b, m in zip(before, modules)]
