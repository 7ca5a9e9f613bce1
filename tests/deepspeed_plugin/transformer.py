"""A small Transformer with matrices of every kind, most of them not square, and its data."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

BATCH, LENGTH, VOCABULARY, EXPERTS = 8, 6, 23, 4


class Experts(nn.Module):
    """Gated MLPs as two stacked weights."""

    def __init__(self, width, inner):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * inner, width) * width**-0.5)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, width, inner) * inner**-0.5)

    def forward(self, x):
        gate, up = torch.einsum("...w,eiw->...ei", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("...ei,ewi->...ew", functional.silu(gate) * up, self.down_proj)


class Mixture(nn.Module):
    """A mixture of all experts, with modules and names as in Mixtral: DeepSpeed can replace it by its own."""

    def __init__(self, width, inner):
        super().__init__()
        self.gate, self.experts = nn.Linear(width, EXPERTS, bias=False), Experts(width, inner)

    def forward(self, x):
        return (self.experts(x) * self.gate(x).softmax(-1).unsqueeze(-1)).sum(-2)


class Block(nn.Module):
    """Attention with a fused QKV, and a gated MLP or another one.

    The QKV has no bias: that of the keys has a gradient of rounding noise alone, which AdamW would scale up to steps of full size.
    """

    def __init__(self, width, heads, inner, mixture=None):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mixture = mixture
        if mixture is None:
            self.gate, self.up, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden = self.norm2(x)
        if self.mixture is not None:
            mixed = self.mixture(hidden)
            return x + (mixed[0] if isinstance(mixed, tuple) else mixed)
        return x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Transformer(nn.Module):
    """Next-token loss of `[b, t]` tokens; one extra projection takes part only where asked.

    Args:
        mixture: of `width` and `inner`, makes what stands in the last block in the place of the MLP.
        tied: the head's weight is the embedding's.
        frozen: prefixes of the names of parameters that are not trained.
    """

    def __init__(self, width=12, heads=2, inner=20, depth=2, mixture=None, tied=False, frozen=()):
        super().__init__()
        self.config = SimpleNamespace(num_local_experts=EXPERTS, num_experts_per_tok=EXPERTS, hidden_act="silu")
        self.embedding = nn.Embedding(VOCABULARY, width)
        mixtures = [None] * (depth - 1) + [mixture and mixture(width, inner)]
        self.blocks = nn.ModuleList(Block(width, heads, inner, each) for each in mixtures)
        self.norm, self.extra = nn.LayerNorm(width), nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY)
        self.temperature = nn.Parameter(torch.ones(1))  # which only one rank can hold
        if tied:
            self.head.weight = self.embedding.weight
        for name, p in self.named_parameters():
            p.requires_grad_(not name.startswith(tuple(frozen)))

    def forward(self, x, y, skip_extra=False):
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        if not skip_extra:
            hidden = hidden + self.extra(hidden)
        return functional.cross_entropy((self.head(hidden) * self.temperature).float().flatten(0, 1), y.flatten())


def tokens(index, batch=BATCH):
    """Batch `index` of inputs and targets `[batch, LENGTH]`: a pure function of it."""
    generator = torch.Generator().manual_seed(index)
    start = torch.randint(0, VOCABULARY, (batch, 1), generator=generator)
    steps = torch.randint(1, 4, (batch, 1), generator=generator)
    sequence = (start + steps * torch.arange(LENGTH + 1)) % VOCABULARY
    return sequence[:, :-1], sequence[:, 1:]
