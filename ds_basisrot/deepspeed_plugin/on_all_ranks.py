"""Steps that every rank takes before any goes on to the next, and that fail on all ranks where they fail on one."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..common.blocks import ConfigError
from ..pipeline.channels import first_words, is_late


def on_all_ranks(action: Callable[[], Any], what: str) -> list[Any]:
    """Do something on every rank; returns what each made of it, by rank.

    Args:
        what: completes the sentence "rank 3 could not ...".

    Raises:
        ConfigError, RuntimeError: on all ranks, where one has failed, so that none waits for it: what it said.
    """
    try:
        result, fault, refused = action(), None, False
    except Exception as error:  # whatever it is, a full disk for one: the others are waiting
        refused = isinstance(error, ValueError)
        result, fault = None, str(error) if refused else f"{type(error).__name__}: {error}"
    results = [(result, fault, refused)]
    if dist.is_initialized():
        results = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(results, (result, fault, refused))
        except RuntimeError as error:
            became = "has waited too long for", "look for what that process is doing"
            if not is_late(error):
                became = "lost its connection to", "that process has ended, look for what it said"
            raise RuntimeError(
                f"rank {dist.get_rank()} {became[0]} another rank when all were to {what}: {became[1]} ({first_words(error)})"
            ) from None
    for rank, (_, fault, refused) in enumerate(results):
        if fault is not None:
            raise ConfigError(fault) if refused else RuntimeError(f"rank {rank} could not {what}: {fault}")
    return [result for result, _, _ in results]
