"""All ranks compare what they are about to run, through the process group's store: a mismatch is an error, never a hang."""

import contextlib
import json
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

TIMEOUT = timedelta(seconds=120)
_rounds = count()


class DisagreementError(RuntimeError):
    """Ranks that would train differently, or one that never came."""


def flat(name: str, value: Any) -> dict[str, Any]:
    """`{"name.key.key": leaf}` of nested mappings, so that a difference names the key it is in."""
    if not isinstance(value, dict):
        return {name: value}
    return {key: leaf for inner, each in value.items() for key, leaf in flat(f"{name}.{inner}" if name else str(inner), each).items()}


def agree(facts: dict[str, Any], amounts: dict[str, int] | None = None) -> dict[str, int]:
    """Compare `facts` over all ranks and add up `amounts`. Every rank calls it the same number of times.

    Args:
        facts: JSON values that must be equal everywhere.
        amounts: numbers to be summed over the ranks.

    Returns:
        The sums.

    Raises:
        DisagreementError: naming the first rank that differs and the fact, or the ranks that did not answer in time.
    """
    amounts = amounts or {}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(amounts)
    rank, world, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    prefix = f"ds_basisrot/agreement/{next(_rounds)}"
    store.set(f"{prefix}/{rank}", json.dumps([facts, amounts]))
    verdict_key = f"{prefix}/verdict"
    if rank == 0:
        store.set(verdict_key, json.dumps(_judge(store, prefix, world, facts)))
    try:
        store.wait([verdict_key], TIMEOUT + timedelta(seconds=30))
    except RuntimeError:
        raise DisagreementError(
            "rank 0 did not compare configurations with this rank: is ds_basisrot installed and active there?"
        ) from None
    fault, sums = json.loads(store.get(verdict_key))
    store.set(f"{prefix}/read/{rank}", "")
    if rank == 0:  # which holds the store, and may be about to end: let the others read first
        with contextlib.suppress(RuntimeError):
            store.wait([f"{prefix}/read/{other}" for other in range(world)], timedelta(seconds=10))
    if fault:
        raise DisagreementError(fault)
    return sums


def _judge(store: Any, prefix: str, world: int, facts: dict[str, Any]) -> tuple[str | None, dict[str, int]]:
    sums: dict[str, int] = {}
    for other in range(world):
        try:
            store.wait([f"{prefix}/{other}"], TIMEOUT)
        except RuntimeError:
            return f"rank {other} did not answer within {TIMEOUT.seconds} s: is ds_basisrot installed and active there?", {}
        theirs, amounts = json.loads(store.get(f"{prefix}/{other}"))
        for key in sorted({*facts, *theirs}):
            if theirs.get(key) != json.loads(json.dumps(facts.get(key))):
                return f"rank {other} differs from rank 0 in {key}: {theirs.get(key)!r} against {facts.get(key)!r}; make them equal", {}
        for key, amount in amounts.items():
            sums[key] = sums.get(key, 0) + amount
    return None, sums
