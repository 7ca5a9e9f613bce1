"""One line on one rank: what is active and why. Frameworks' own loggers hide such lines by default, so ours is apart."""

import logging
import sys

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
