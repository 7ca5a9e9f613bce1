"""A small Transformer with matrices of every kind, all of the non-square ones included, and its data."""

import torch
from torch import nn
from torch.nn import functional

BATCH, LENGTH, VOCABULARY = 8, 6, 23


class Block(nn.Module):
    """Attention with a fused QKV, and a gated MLP."""

    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden = self.norm2(x)
        return x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Transformer(nn.Module):
    """Next-token loss of `[b, t]` tokens; one extra projection takes part only where asked."""

    def __init__(self, width=12, heads=2, inner=20, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(depth))
        self.norm, self.extra = nn.LayerNorm(width), nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x, y, skip_extra=False):
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        if not skip_extra:
            hidden = hidden + self.extra(hidden)
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), y.flatten())


def tokens(index, batch=BATCH):
    """Batch `index` of inputs and targets `[batch, LENGTH]`: a pure function of it."""
    generator = torch.Generator().manual_seed(index)
    start = torch.randint(0, VOCABULARY, (batch, 1), generator=generator)
    steps = torch.randint(1, 4, (batch, 1), generator=generator)
    sequence = (start + steps * torch.arange(LENGTH + 1)) % VOCABULARY
    return sequence[:, :-1], sequence[:, 1:]
