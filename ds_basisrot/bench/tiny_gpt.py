"""A small decoder-only GPT over bytes, as the layers of a pipeline: embedding, pre-norm blocks, output head."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256

# Large on purpose: with the usual 0.02 a narrow model spends its first thousand updates on a plateau.
EMBEDDING_STD = 0.3


class Embedding(nn.Module):
    """Byte plus learned position: int64 `[batch, context]` -> `[batch, context, width]`."""

    def __init__(self, vocabulary: int, width: int, context: int, seed: int):
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        generator = torch.Generator().manual_seed(seed)
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=EMBEDDING_STD, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]


class Attention(nn.Module):
    """Causal multi-head self-attention, `[batch, context, width]` -> same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, context, width] -> [batch, heads, context, width / heads]
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two matrices with a GELU between them, `[batch, context, width]` -> same."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual stream `[batch, context, width]`."""

    def __init__(self, width: int, heads: int, layers: int, seed: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        _initialise_linears(self, width, seed)
        with torch.no_grad():  # 2 * layers branches add up in the residual stream, whose variance should not depend on the depth
            for output in (self.attention.proj, self.mlp.down):
                output.weight.div_(math.sqrt(2 * layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """Final LayerNorm and output matrix, not tied to the embedding: `[batch, context, width]` -> `[batch, context, vocabulary]`."""

    def __init__(self, vocabulary: int, width: int, seed: int):
        super().__init__()
        self.final_norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary)
        _initialise_linears(self, width, seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.final_norm(x))


def _initialise_linears(module: nn.Module, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for linear in module.modules():
        if isinstance(linear, nn.Linear):
            nn.init.normal_(linear.weight, std=0.02 * math.sqrt(384 / width), generator=generator)
            nn.init.zeros_(linear.bias)


def tiny_gpt(layers: int, width: int, heads: int, context: int, seed: int) -> nn.Sequential:
    """The whole model, whose layers are named "0" to str(layers + 1) as in a DeepSpeed PipelineModule; a slice of it keeps the names.

    Each layer draws its weights from a generator of its own, so that they do not depend on the number of stages.
    """
    seeds = [1_000_003 * seed + index for index in range(layers + 2)]
    blocks = [Block(width, heads, layers, block_seed) for block_seed in seeds[1:-1]]
    chain = [Embedding(VOCABULARY, width, context, seeds[0]), *blocks, Head(VOCABULARY, width, seeds[-1])]
    return nn.Sequential(OrderedDict((str(index), layer) for index, layer in enumerate(chain)))


def cut(model: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """The model as pipeline stages with equally many blocks each, or one more; the first also has the embedding, the last the head.

    Raises:
        ValueError: more stages than blocks.
    """
    blocks = len(model) - 2
    if not 1 <= stages <= blocks:
        raise ValueError(f"stages: must be 1 to the number of blocks, {blocks}, got {stages}")
    ends = [0, *(1 + blocks * k // stages for k in range(1, stages)), len(model)]
    return [model[start:end] for start, end in zip(ends, ends[1:])]


def next_byte_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte, in float32 whatever the model's dtype."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
