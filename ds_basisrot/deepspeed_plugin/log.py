"""One line on one rank, or for each stage: what is active and why. DeepSpeed's own logger hides such lines by default, so ours is apart."""

import logging
import sys
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("ds_basisrot")


def _handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(name)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
    return handler


def log(message: str, rank: int = 0) -> None:
    """Log `message` on `rank`; other ranks stay silent. Set the level of logger "ds_basisrot" to hide it."""
    if not logger.handlers:
        logger.addHandler(_handler())
        logger.propagate = False
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    if not dist.is_initialized() or dist.get_rank() == rank:
        logger.info(message)


def speaks(engine: Any) -> bool:
    """Whether this rank speaks for its pipeline stage: the first replica does, rank 0 where there is no pipeline."""
    grid = getattr(engine.module, "_grid", None)
    return engine.global_rank == 0 if grid is None else grid.get_data_parallel_id() == 0


def log_stage(engine: Any, message: str) -> None:
    """Log `message` once for each pipeline stage, with the number of the stage; once where there is no pipeline."""
    grid = getattr(engine.module, "_grid", None)
    if speaks(engine):
        log(message if grid is None else f"stage {grid.get_stage_id()}: {message}", rank=engine.global_rank)
