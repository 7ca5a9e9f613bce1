"""The process groups that share the updates of parameters: data-parallel ranks, and those of all tensor-parallel ranks together."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from .matrices import Place, Places
from .optimizer_names import check_attributes


@dataclass(frozen=True)
class Sharers:
    """The process groups that share the parameters of one of Megatron's optimizers.

    Attributes:
        tensor: tensor-parallel ranks.
        replicas: data-parallel ranks.
        joined: the data-parallel ranks of all tensor-parallel ones; None where no matrix is whole over them.
        table: `table[tensor-parallel rank][data-parallel rank]` is a rank in `joined`.
    """

    tensor: Any
    replicas: Any
    joined: Any = None
    table: tuple[tuple[int, ...], ...] = ()

    def of(self, shards: int) -> tuple[Any, tuple[tuple[int, ...], ...]]:
        """The group that shares what has so many shards, and its ranks by shard and replica."""
        if shards == 1:
            return self.replicas, (tuple(range(dist.get_world_size(self.replicas))),)
        return self.joined, self.table


class Groups:
    """Megatron's process groups, and those that are made of them. Every rank of the world builds it.

    Args:
        chunk: one of the model's; its data-parallel groups share the parameters of all.
        collection: the process groups that Megatron was given; None: its global ones.
        exact: whether matrices are whole over tensor-parallel ranks.

    Attributes:
        places: where this rank is.
        dense: who shares parameters of which every expert-parallel rank has a copy.
        experts: who shares the others.
    """

    def __init__(self, chunk: DistributedDataParallel, collection: Any, exact: bool):
        check_attributes(chunk, "DistributedDataParallel")
        state = parallel_state
        tensor = collection.tp if collection else state.get_tensor_model_parallel_group()
        expert_tensor = getattr(collection, "expt_tp", tensor) if collection else state.get_expert_tensor_parallel_group()
        expert = getattr(collection, "ep", None) if collection else state.get_expert_model_parallel_group()
        self.places = Places(place_in(tensor), place_in(expert_tensor), place_in(expert) if expert else Place(0, 1))
        join = _joined if exact else lambda *groups: (None, ())
        self.dense = Sharers(tensor, chunk.intra_dp_cp_group, *join(tensor, chunk.intra_dp_cp_group))
        self.experts = Sharers(expert_tensor, chunk.intra_expt_dp_group, *join(expert_tensor, chunk.intra_expt_dp_group))


def _joined(tensor: Any, replicas: Any) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    """`joined` and `table` of `Sharers`. Every rank of the world calls it."""
    of_shards: list[list[int]] = [[] for _ in range(dist.get_world_size(tensor))]
    dist.all_gather_object(of_shards, dist.get_process_group_ranks(replicas), group=tensor)
    if len(of_shards) == 1:
        return None, ()
    members = tuple(sorted(chain.from_iterable(of_shards)))
    of_world: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(of_world, members)
    made = {ranks: dist.new_group(list(ranks)) for ranks in sorted(set(of_world))}
    return made[members], tuple(tuple(members.index(rank) for rank in ranks) for ranks in of_shards)


def place_in(group: Any) -> Place:
    """This rank in a process group."""
    return Place(dist.get_rank(group), dist.get_world_size(group))
