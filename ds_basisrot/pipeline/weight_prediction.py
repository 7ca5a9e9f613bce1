"""Weight prediction: how far Adam's momentum alone takes the weights during the updates that a late gradient will miss."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

ADAMS = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
"""Optimizers, and bases of optimizers, that step as Adam does; others have states of the same names and step in another way."""

# Elements of parameters that are predicted in one tensor: what copying so few costs is less than what starting operations for each does.
LARGEST_BATCH = 1 << 16


def check(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose next steps are not known.

    Raises:
        ValueError: it is neither Adam, nor one that predicts by itself, or it is Adam with `amsgrad`.
    """
    if hasattr(optimizer, "predicted_changes"):
        return
    if not _is_one_of(optimizer, ADAMS):
        raise ValueError(f"pipeline.weight_prediction: needs Adam, AdamW or BasisRotation, got {type(optimizer).__name__}")
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError("pipeline.weight_prediction: does not go with Adam's amsgrad; switch one of them off")


@torch.no_grad()
def predicted_changes(optimizer: torch.optim.Optimizer, updates: int) -> dict[Tensor, Tensor]:
    """What to add to each weight to have it as it would be some updates later, if all further gradients were zero:

        sum over s = 1..updates of -lr (b1^s m / (1 - b1^(t+s))) / (sqrt(v / (1 - b2^(t+s))) + eps)

    with moments m and v and the count t as they are in the state, and the group's learning rate as it is. The second moment is held, and no
    weight decays. An optimizer with a method `predicted_changes(updates)` gives its own.

    Args:
        optimizer: one that `check` accepts; nothing in it is changed.
        updates: how many, >= 0.

    Returns:
        By parameter, float32 in its shape, for those that have a state.

    Raises:
        ValueError: as `check` does; a negative number of updates.
    """
    check(optimizer)
    if updates < 0:
        raise ValueError(f"updates: must be >= 0, got {updates}")
    if hasattr(optimizer, "predicted_changes"):
        return optimizer.predicted_changes(updates)
    changes: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        alike = defaultdict(list)
        for p, step in _steps(optimizer, group).items():
            alike[step, p.device].append(p)
        for (step, _), members in alike.items():
            for batch in _batches(members):
                moments = (_flatten_dense_tensors([optimizer.state[p][key] for p in batch]).float() for key in ("exp_avg", "exp_avg_sq"))
                change = _predicted_change(*moments, step, group, updates)
                changes.update(zip(batch, _unflatten_dense_tensors(change, batch)))
    return changes


def _predicted_change(momentum: Tensor, second_moment: Tensor, step: int, group: dict[str, Any], updates: int) -> Tensor:
    beta1, beta2 = map(float, group["betas"])
    corrected = group.get("bias_correction", True)
    root = second_moment.sqrt()
    change = torch.zeros_like(root)
    for ahead in range(1, updates + 1):
        first, second = (1 - beta ** (step + ahead) if corrected else 1.0 for beta in (beta1, beta2))
        denominator = root.div(math.sqrt(second)).add_(group["eps"])
        direction = torch.div(momentum, denominator, out=denominator)
        change.sub_(direction.mul_(float(group["lr"]) * beta1**ahead / first))  # no fused operation, which rounds here so and there so
    return change


def _steps(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[Tensor, int]:
    """How many updates each parameter of the group has had, for those that have a state."""
    states = {p: optimizer.state[p] for p in group["params"] if optimizer.state.get(p)}
    steps = {p: int(state.get("step", group.get("step", 0))) for p, state in states.items()}
    if _is_one_of(optimizer, ("FusedAdam",)):  # which counts in the state of one of a group's parameters only
        return dict.fromkeys(steps, max(steps.values(), default=0))
    return steps


def _batches(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive parameters up to a size in all, a larger one alone."""
    batch, size = [], 0
    for p in parameters:
        if batch and size + p.numel() > LARGEST_BATCH:
            yield batch
            batch, size = [], 0
        batch.append(p)
        size += p.numel()
    if batch:
        yield batch


def _is_one_of(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> bool:
    return any(cls.__name__ in names for cls in type(optimizer).__mro__)
