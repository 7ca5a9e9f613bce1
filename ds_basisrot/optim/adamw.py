"""AdamW for the parameters that are not rotated: torch's fused kernel where their states are ordinary, the same formula where not."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim.adamw import adamw

from .gradient_gate import Gate
from .state import MOMENTUM, SCALE, SECOND_MOMENT, SMALLEST_EPS, STEP

Members = Sequence[tuple[dict[str, Any], Tensor, dict[str, Any]]]
"""(group, parameter, state) of each."""

# Elements of a parameter that is updated together with others, and of all of these. What copying them costs is less than what starting a
# dozen operations for each costs, and they stay in a core's cache.
LARGEST_JOINED, LARGEST_BATCH = 1 << 13, 1 << 16


def update(parameters: Members, gate: Gate, layout_independent: bool = False) -> None:
    """One AdamW update of (group, parameter, state) each; the states' `step` counts this update already.

    With `layout_independent`, a processor rounds every element alike, wherever it lies in memory. Fused operations do not: where a vector
    register is not filled, they may round a product that they otherwise do not.
    """
    fused, alike = defaultdict(list), defaultdict(list)
    for group, p, state in parameters:
        if not (layout_independent and p.device.type == "cpu") and _is_ordinary(p, state):
            fused[id(group), state[STEP], p.device].append((group, p, state))
        else:
            alike[id(group), state[STEP], state[SCALE], p.device, p.dtype, p.grad.dtype].append((group, p, state))
    for members in fused.values():
        _update_fused(members, gate)
    for members in alike.values():
        for batch in _batches(members):
            _update_joined(batch, gate)


def predicted_changes(parameters: Members, updates: int) -> dict[Tensor, Tensor]:
    """What the momenta alone would add to each weight in the next updates, without weight decay: float32.

    sum over s = 1..updates of -lr (b1^s m / (1 - b1^(t+s))) / (sqrt(v / (1 - b2^(t+s))) + eps)
    """
    alike, changes = defaultdict(list), {}
    for group, p, state in parameters:
        alike[id(group), state[STEP], state[SCALE], p.device].append((group, p, state))
    for members in alike.values():
        for batch in _batches(members):
            group, _, state = batch[0]
            moments = [_flatten_dense_tensors([its[key] for _, _, its in batch]) for key in (MOMENTUM, SECOND_MOMENT)]
            weights = [p for _, p, _ in batch]
            changes.update(zip(weights, _unflatten_dense_tensors(_predicted_change(*moments, state, group, updates), weights)))
    return changes


def _predicted_change(momentum: Tensor, second_moment: Tensor, state: dict[str, Any], group: dict[str, Any], updates: int) -> Tensor:
    beta1, beta2 = group["betas"]
    eps = max(group["eps"] / state[SCALE], SMALLEST_EPS)
    root = second_moment.sqrt()
    change = torch.zeros_like(root)
    for ahead in range(1, updates + 1):
        step = state[STEP] + ahead
        denominator = root.div(math.sqrt(1 - beta2**step)).add_(eps)
        direction = torch.div(momentum, denominator, out=denominator)
        change.sub_(direction.mul_(float(group["lr"]) * beta1**ahead / (1 - beta1**step)))
    return change


def _is_ordinary(p: Tensor, state: dict[str, Any]) -> bool:
    tensors = (p, p.grad, state[MOMENTUM], state[SECOND_MOMENT])
    return state[SCALE] == 1.0 and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def _update_fused(members: Members, gate: Gate) -> None:
    """Members of one group and step, by torch's kernel."""
    group, p, state = members[0]
    beta1, beta2 = group["betas"]
    before = torch.full((), state[STEP] - 1.0, device=p.device)
    adamw(
        [p for _, p, _ in members],
        [p.grad for _, p, _ in members],
        [state[MOMENTUM] for _, _, state in members],
        [state[SECOND_MOMENT] for _, _, state in members],
        [],
        [before.clone() for _ in members],
        fused=True,
        found_inf=None if gate.flag is None else (~gate.flag).float().to(p.device),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _batches(members: Members) -> list[Members]:
    """Small members together, up to a size, and each large one alone."""
    batches, open_batch, size = [], [], 0
    for member in members:
        numel = member[1].numel()
        if numel > LARGEST_JOINED:
            batches.append([member])
            continue
        if size + numel > LARGEST_BATCH:
            batches.append(open_batch)
            open_batch, size = [], 0
        open_batch.append(member)
        size += numel
    return [*batches, open_batch] if open_batch else batches


def _update_joined(members: Members, gate: Gate) -> None:
    """Members of one group, step, unit and dtype, one after the other in one tensor: every element is rounded as it would be alone."""
    group, p, state = members[0]
    if len(members) == 1:
        _update_elements(p, p.grad, state[MOMENTUM], state[SECOND_MOMENT], state, group, gate)
        return
    changing = [[p for _, p, _ in members], [s[MOMENTUM] for _, _, s in members], [s[SECOND_MOMENT] for _, _, s in members]]
    weight, *moments = map(_flatten_dense_tensors, changing)
    _update_elements(weight, _flatten_dense_tensors([p.grad for _, p, _ in members]), *moments, state, group, gate)
    for tensors, joined in zip(changing, (weight, *moments)):
        torch._foreach_copy_(tensors, _unflatten_dense_tensors(joined, tensors))


def _update_elements(
    p: Tensor, gradient: Tensor, momentum: Tensor, second_moment: Tensor, state: dict[str, Any], group: dict[str, Any], gate: Gate
) -> None:
    """In operations that round once; `state` gives step and unit."""
    beta1, beta2 = group["betas"]
    gradient = gate.gradient(gradient if state[SCALE] == 1.0 else gradient / state[SCALE]).to(torch.float32)
    momentum.mul_(gate.decay(beta1)).add_(gradient * (1 - beta1))
    second_moment.mul_(gate.decay(beta2)).add_(gradient.square().mul_(1 - beta2))
    eps = max(group["eps"] / state[SCALE], SMALLEST_EPS)
    denominator = second_moment.sqrt().div_(math.sqrt(1 - beta2 ** state[STEP])).add_(eps)
    step_size = float(group["lr"]) / (1 - beta1 ** state[STEP])
    add_to_weight(p, momentum / denominator, step_size, group, gate)


def add_to_weight(p: Tensor, direction: Tensor, step_size: float, group: dict[str, Any], gate: Gate) -> None:
    """p <- (1 - lr wd) p - step_size * direction, in float32 for parameters of less precision. Overwrites `direction`."""
    weight = p if p.dtype in (torch.float32, torch.float64) else p.to(torch.float32)
    weight.mul_(gate.decay(1 - float(group["lr"]) * group["weight_decay"], weight.dtype))
    weight.add_(direction.mul_(gate.amount(-step_size)).to(weight.dtype))
    if weight is not p:
        p.copy_(weight)


def add_product_to_weight(weight: Tensor, a: Tensor, b: Tensor, step_size: float, group: dict[str, Any], gate: Gate) -> None:
    """`add_to_weight` of the direction a b, in one product, for a float32 weight `[m, n]`."""
    decay, amount = gate.decay(1 - float(group["lr"]) * group["weight_decay"]), gate.amount(-step_size)
    if gate.flag is None:
        weight.addmm_(a, b, beta=decay, alpha=amount)
    else:
        weight.mul_(decay).addmm_(a.mul_(amount), b)
