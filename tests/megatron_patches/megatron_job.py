"""A small GPT training job as data: what the real processes run and what the simulation repeats. Needs no Megatron."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EVALUATED = 1_000_000  # index of the first microbatch of an evaluation: far from those that are trained


@dataclass(frozen=True)
class Job:
    """One case. Sizes are tiny, dropout is 0, the data depend only on a microbatch's index and its replica."""

    name: str
    """Folder of its results."""
    pp: int = 1
    """Pipeline stages."""
    tp: int = 1
    """Tensor-parallel ranks of a stage."""
    dp: int = 1
    """Data-parallel replicas."""
    bf16: bool = False
    """bfloat16 parameters, with float32 copies that the optimizer updates and float32 gradients; else float32."""
    optimizer: str = "adam"
    """Megatron's name of it."""
    distributed_optimizer: bool = False
    """Optimizer states sharded over the replicas."""
    overlap: bool = False
    """Reduce gradients, and gather sharded parameters, while computing."""
    tied: bool = False
    """Embedding and output layer share their weight."""
    microbatches: int = 4
    """Per step and replica."""
    steps: int = 6
    """Calls of the schedule, each followed by an update."""
    micro_batch_size: int = 2
    """Sequences."""
    clip: float = 0.0
    """Largest gradient norm; 0 does not clip."""
    swiglu: bool = False
    """Gated MLPs."""
    query_groups: int | None = None
    """Key-value heads; None: as many as heads."""
    experts: int | None = None
    """Experts of each layer, of which a token takes two; None: dense."""
    recompute: bool = False
    """Forward every layer once more in the backward pass."""
    lr: float = 1e-2
    """Learning rate after the warm-up."""
    warmup: int = 0
    """Steps of a linear warm-up."""
    weight_decay: float = 0.01
    """Of matrices; Megatron does not decay vectors."""
    evaluate_after: int | None = None
    """Steps before an evaluation; None: no evaluation."""
    seed: int = 1
    """Of the initial weights."""
    layers: int = 4
    """Of all stages."""
    hidden: int = 32
    """Width of the model."""
    ffn: int = 64
    """Width of an MLP."""
    heads: int = 4
    """Query heads."""
    vocabulary: int = 64
    """Different tokens."""
    sequence: int = 16
    """Tokens of a sequence."""
    basisrot: dict[str, Any] | None = None
    """What `megatron_patches.apply` is given before the job; None: Megatron as it is."""

    @property
    def processes(self) -> int:
        """Ranks that it needs."""
        return self.pp * self.tp * self.dp

    @property
    def batch(self) -> int:
        """Sequences of a step, of all replicas."""
        return self.microbatches * self.micro_batch_size * self.dp

    @property
    def gathers_late(self) -> bool:
        """Whether updated parameters arrive in the next forward pass."""
        return self.overlap and self.distributed_optimizer

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and activations."""
        return torch.bfloat16 if self.bf16 else torch.float32


def microbatch(job: Job, index: int, replica: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, `[micro_batch_size, sequence]` each. A token determines its successor, so there is something to learn."""
    generator = torch.Generator().manual_seed(1000 * index + replica)
    sequence = torch.randint(job.vocabulary, (job.micro_batch_size, 1), generator=generator)
    for _ in range(job.sequence):
        sequence = torch.cat([sequence, (3 * sequence[:, -1:] + 1) % job.vocabulary], dim=1)
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


class Microbatches(Iterator[tuple[Tensor, Tensor]]):
    """A replica's microbatches, one after another.

    Attributes:
        next_index: of the microbatch that is drawn next.
    """

    def __init__(self, job: Job, replica: int, first: int = 0):
        self.job, self.replica, self.next_index = job, replica, first

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.next_index += 1
        return microbatch(self.job, self.next_index - 1, self.replica)
