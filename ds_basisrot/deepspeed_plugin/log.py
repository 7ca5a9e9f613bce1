"""One line for each pipeline stage."""

from typing import Any

from ..common.log import log


def speaks(engine: Any) -> bool:
    """Whether this rank speaks for its pipeline stage: the first replica does, rank 0 where there is no pipeline."""
    grid = getattr(engine.module, "_grid", None)
    return engine.global_rank == 0 if grid is None else grid.get_data_parallel_id() == 0


def log_stage(engine: Any, message: str) -> None:
    """Log `message` once for each pipeline stage, with the number of the stage; once where there is no pipeline."""
    grid = getattr(engine.module, "_grid", None)
    if speaks(engine):
        log(message if grid is None else f"stage {grid.get_stage_id()}: {message}", rank=engine.global_rank)
