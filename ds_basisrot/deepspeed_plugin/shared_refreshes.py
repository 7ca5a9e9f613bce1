"""Tells the optimizer of each stage about all stages, between which `refresh_allocation` shares the refreshes, and logs the outcome."""

from typing import Any

from ..optim import refresh
from ..pipeline.schedule import AsyncSchedule
from .log import log_stage


def own_cost(engine: Any) -> dict[str, int]:
    """What one refresh of all matrices of this rank's stage costs, for `agreement.agree` to add up; one replica of a stage gives it."""
    optimizer = engine.basic_optimizer
    if engine.grid.get_data_parallel_id() > 0 or not hasattr(optimizer, "share_refreshes"):
        return {}
    return {_name(engine.stage_id): optimizer.refresh_cost()}


def share(engine: Any, costs: dict[str, int]) -> None:
    """Tell this stage's optimizer how late each stage is in updates, on average, at the engine's present microbatches per update.

    Args:
        costs: of all stages, the sums of what `own_cost` gave.
    """
    optimizer = engine.basic_optimizer
    if not hasattr(optimizer, "share_refreshes"):
        return
    schedule = AsyncSchedule(engine.num_stages, engine.micro_batches)
    staleness = [schedule.staleness(k) / engine.micro_batches for k in range(engine.num_stages)]
    of_stages = [costs.get(_name(k), 0) for k in range(engine.num_stages)]
    optimizer.share_refreshes(staleness, of_stages, engine.stage_id)
    for allocation, period in sorted({(group["refresh_allocation"], group["refresh_period"]) for group in optimizer.param_groups}):
        if allocation != "uniform" and of_stages[engine.stage_id] > 0:
            log_stage(engine, refresh.describe_share(allocation, period, staleness, of_stages, engine.stage_id))


def _name(stage: int) -> str:
    return f"refresh cost of stage {stage}"
