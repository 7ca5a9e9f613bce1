"""Embedding and output layer that share a weight, on the first and the last stage: Megatron would sum their gradients in every update."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from ds_basisrot.pipeline.channels import TIED, Channel, group_of_pair
from ds_basisrot.pipeline.lagged_norms import LaggedNorms
from ds_basisrot.pipeline.tied_gradients import Pending, TiedWeight
from ds_basisrot.sharding.layouts import cut_in_buffer

from .optimizer_names import check_attributes


def are_tied(model: torch.nn.Module) -> bool:
    """Whether the model shares the weight."""
    return bool(get_attr_wrapped_model(model, "share_embeddings_and_output_weights", allow_none=True))


def shared_weight(model: torch.nn.Module) -> Tensor | None:
    """The copy of the shared weight on this stage, if it has one."""
    return get_attr_wrapped_model(model, "shared_embedding_or_output_weight")() if are_tied(model) else None


class Held(NamedTuple):
    """What Megatron's distributed optimizer reduces of a gradient on this rank.

    Attributes:
        pieces: of the flattened gradient; the rest of it is this replica's own.
        replicas: process group of those that hold the rest.
    """

    pieces: list[slice]
    replicas: Any


class TiedEmbeddings:
    """The copy of the shared weight on this stage, if it has one. Every rank of the job builds it at the same time.

    An update applies the sum of both stages' gradients of an earlier update, the same on both: the first stage's part reaches the last no
    sooner. The sum stands in for the gradient when norms are taken; behind clipping, what is applied takes its place.

    Args:
        model: the chunk of this rank.
        pipelines: for every pipeline of the job, the global ranks of its stages in order.
        own: the process group of this rank's pipeline.
        norms: of this stage.
    """

    def __init__(self, model: torch.nn.Module, pipelines: list[list[int]], own: Any, norms: LaggedNorms):
        self._norms, self._update, self._own_gradient = norms, 0, None
        self._weight = shared_weight(model)
        self._held = _held(model, self._weight)
        me = dist.get_rank()
        for ranks in pipelines:
            groups = [group_of_pair((ranks[0], ranks[-1]), own) for _ in range(2)]
            if me not in (ranks[0], ranks[-1]):
                continue
            stages = (0, len(ranks) - 1) if me == ranks[0] else (len(ranks) - 1, 0)
            groups = groups if me == ranks[0] else groups[::-1]
            channels = [Channel(*stages, ranks[stages[1]], group, TIED, self._weight.device) for group in groups]
            self.tied = TiedWeight("word_embeddings", self._weight, *channels)

    def put_sum(self, update: int, microbatches: int) -> None:
        """Before an update: take this stage's reduced gradient, and put the sum that is due in its place."""
        if self._weight is None:
            return
        self._update, self._own_gradient = update, self._weight.main_grad.clone()
        self._weight.main_grad.copy_(self.tied.due(update, microbatches))

    def attach(self, optimizer: Any) -> None:
        """Let a Megatron optimizer, chained or not, apply what both copies apply, and send this stage's part after the update."""
        if self._weight is None:
            return
        native = optimizer.step_with_ready_grads

        def step_with_ready_grads() -> bool:
            self._weight.main_grad.copy_(self.tied.applied)
            main = getattr(self._weight, "main_param", None)
            if main is not None and main.shape == self._weight.shape and main.grad is not None:
                main.grad.copy_(self.tied.applied)
            successful = native()
            self.tied.exchange(self._update, self._own_gradient, self._norms.factor)
            return successful

        optimizer.step_with_ready_grads = step_with_ready_grads

    def state(self) -> list[tuple[int, Tensor, Tensor]]:
        """(update, sum, factor) of what was not applied yet, after waiting for it. Every replica calls it, and gets the same."""
        if self._weight is None:
            return []
        self.tied.settle()
        return [(each.update, self._of_replicas(each.total).cpu(), each.factor.cpu()) for each in self.tied.pending]

    def _of_replicas(self, total: Tensor) -> Tensor:
        """A sum whose parts come from the replicas that hold them."""
        if self._held is None:
            return total
        whole = torch.zeros_like(total)
        for piece in self._held.pieces:
            whole.view(-1)[piece].copy_(total.view(-1)[piece])
        dist.all_reduce(whole, group=self._held.replicas)
        return whole

    def restore(self, state: list[tuple[int, Tensor, Tensor]]) -> None:
        """Take in what `state` gave; an empty list: begin anew."""
        if self._weight is None:
            return
        self.tied.settle()  # nothing of before may arrive later
        self.tied.pending.clear()
        device = self._weight.device
        self.tied.pending.extend(Pending(update, total=total.to(device), factor=factor.to(device)) for update, total, factor in state)


def _held(model: torch.nn.Module, weight: Tensor | None) -> Held | None:
    """None where every replica has the whole gradient."""
    if weight is None or not model.ddp_config.use_distributed_optimizer:
        return None
    buffer = next(buffer for buffer in model.buffers if weight in buffer.param_index_map)
    check_attributes(buffer, "buffer")
    (start, _, index), replicas = buffer.param_index_map[weight], buffer.data_parallel_group
    bucket = buffer.buckets[index]
    pieces = cut_in_buffer(start - bucket.offset, weight.numel(), bucket.grad_data.numel() // replicas.size())
    return Held([slice(each.offset, each.offset + each.numel) for each in pieces if each.rank == replicas.rank()], replicas)
