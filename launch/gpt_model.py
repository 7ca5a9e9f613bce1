"""A decoder-only GPT as a list of pipeline layers: embedding, pre-norm blocks, output head."""

import math

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

EMBEDDING_STD = 0.3  # large on purpose: with the usual 0.02 a narrow model sits on a plateau for its first thousand updates


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
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token_embedding(tokens) + self.position_embedding(positions)


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
        def split(projected: Tensor) -> Tensor:  # [batch, context, width] -> [batch, heads, context, width / heads]
            return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(split(self.query(x)), split(self.key(x)), split(self.value(x)), is_causal=True)
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
    """LayerNorm, attention, LayerNorm, MLP, each pair added to the residual stream `[batch, context, width]`."""

    def __init__(self, width: int, heads: int, layers: int, seed: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        _initialise_linears(self, width, seed)
        with torch.no_grad():  # 2 * layers branches add up in the residual stream; keep its variance independent of depth
            for output in (self.attention.proj, self.mlp.down):
                output.weight.div_(math.sqrt(2 * layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """Final LayerNorm and the output matrix, not tied to the embedding: `[batch, context, width]` -> `[batch, context, vocabulary]`."""

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


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte, in fp32 whatever the model's dtype."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def layer_specs(vocabulary: int, layers: int, width: int, heads: int, context: int, seed: int) -> list[LayerSpec]:
    """The model's layers + 2 pipeline layers.

    Each draws from a generator of its own, so a weight starts the same in whichever stage and process it is built.
    """
    seeds = [1_000_003 * seed + index for index in range(layers + 2)]
    blocks = [LayerSpec(Block, width, heads, layers, seeds[1 + index]) for index in range(layers)]
    return [LayerSpec(Embedding, vocabulary, width, context, seeds[0]), *blocks, LayerSpec(Head, vocabulary, width, seeds[-1])]


def pipeline(stages: int, **shape: int) -> PipelineModule:
    """The model cut into `stages`; `shape` is what `layer_specs` takes.

    Cut by the number of blocks, not of parameters: blocks are equal and hold nearly all the work, whereas an embedding has
    many parameters and next to no work, so counting parameters would give its stage too few blocks.
    """
    return PipelineModule(layer_specs(**shape), num_stages=stages, loss_fn=next_token_loss, partition_method="type:Block")
