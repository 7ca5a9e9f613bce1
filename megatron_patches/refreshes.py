"""Tells the rotations of each stage about all stages, between which `refresh_allocation` shares the refreshes."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from ds_basisrot.common.agreement import agree
from ds_basisrot.common.log import log
from ds_basisrot.optim import refresh
from ds_basisrot.pipeline.schedule import staleness


def costs_of_stages(rotations: Sequence[Any]) -> list[int]:
    """What one refresh of all matrices of each stage costs, of one of its ranks. Every rank of the job calls it."""
    stages, stage = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_rank()
    names = [f"refresh cost of stage {k}" for k in range(stages)]
    sums = agree({}, {names[stage]: sum(rotation.refresh_cost() for rotation in rotations)} if _speaks() else {})
    return [sums.get(name, 0) for name in names]


def share(rotations: Sequence[Any], costs: Sequence[int], microbatches: int) -> None:
    """Tell this stage how late each stage is in updates, at so many microbatches per update.

    Args:
        rotations: of this rank.
        costs: of all stages.
        microbatches: per update.
    """
    stages, stage = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_rank()
    late = [staleness(k, stages) / microbatches for k in range(stages)]
    for rotation in rotations:
        rotation.share_refreshes(late, costs, stage)
    allocations = {(group["refresh_allocation"], group["refresh_period"]) for rotation in rotations for group in rotation.param_groups}
    for allocation, period in sorted(allocations):
        if allocation != "uniform" and costs[stage] > 0 and _speaks():
            described = refresh.describe_share(allocation, period, late, costs, stage)
            log(f"stage {stage}: {described}", rank=dist.get_rank())


def _speaks() -> bool:
    """Whether this rank speaks for its pipeline stage."""
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == parallel_state.get_tensor_model_parallel_rank() == 0
