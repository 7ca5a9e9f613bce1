"""The small model and data that the engine and the simulator train alike."""

import torch
from torch import nn

WIDTH = 12
BATCH = 4


class Block(nn.Module):
    """A residual layer with a non-square pair of matrices, seeded by its place in the model."""

    def __init__(self, index, dropout=0.0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(100 + index)
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, 2 * WIDTH)
            self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        if not self.training:
            torch.rand(())  # an evaluation that draws random numbers must not disturb training's
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class TakesTuple(nn.Module):
    """A layer of a pipeline whose stages exchange tuples: the activation, integer positions, and a mask that is used and passed on."""

    def __init__(self, layer, first, last):
        super().__init__()
        self.layer, self.first, self.last = layer, first, last

    def forward(self, inputs):
        if self.first:
            inputs = (inputs, torch.arange(len(inputs)), inputs[:, :1] > -10)
        x, positions, mask = inputs
        x = torch.where(mask, self.layer(x), 0.0)[positions]
        return x if self.last else (x, positions, mask)


def blocks(stages, dropout=0.0):
    """All layers of a model with two blocks a stage."""
    return [Block(index, dropout) for index in range(2 * stages)]


def microbatch(index, replica=0, dtype=torch.float32):
    """Microbatch `index` of a replica: a pure function of both."""
    generator = torch.Generator().manual_seed(1000 * index + replica)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x.to(dtype), (x.sin() * 0.5).to(dtype)


def stream(replica=0, start=0, dtype=torch.float32):
    """Endless microbatches from `start` on."""
    index = start
    while True:
        yield microbatch(index, replica, dtype)
        index += 1


OPTIMIZERS = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
    "NAdam": {
        "type": "NAdam",
        "params": {"lr": 1e-2, "betas": [0.99, 0.999], "momentum_decay": 0.004, "decoupled_weight_decay": True},
    },
    "BasisRotation": {"type": "BasisRotation", "params": {"lr": 1e-2, "weight_decay": 0.01, "refresh_period": 3}},
    "SGD": {"type": "SGD", "params": {"lr": 1e-1}},
}
