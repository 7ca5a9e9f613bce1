"""AdamW for the parameters that are not rotated: torch's fused kernel where their states are ordinary, the same formula where not."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .gradient_gate import Gate
from .state import MOMENTUM, SCALE, SECOND_MOMENT, SMALLEST_EPS, STEP


def update(parameters: list[tuple[dict[str, Any], Tensor, dict[str, Any]]], gate: Gate, layout_independent: bool = False) -> None:
    """One AdamW update of (group, parameter, state) each; the states' `step` counts this update already.

    With `layout_independent`, a processor rounds every element alike, wherever it lies in memory. Fused operations do not: where a vector
    register is not filled, they may round a product that they otherwise do not.
    """
    fused = defaultdict(list)
    for group, p, state in parameters:
        if _is_ordinary(p, state) and not (layout_independent and p.device.type == "cpu"):
            fused[id(group), state[STEP], p.device].append((group, p, state))
        else:
            _update_one(p, state, group, gate)
    for (_, step, device), members in fused.items():
        group, (beta1, beta2) = members[0][0], members[0][0]["betas"]
        before = torch.full((), step - 1.0, device=device)
        adamw(
            [p for _, p, _ in members],
            [p.grad for _, p, _ in members],
            [state[MOMENTUM] for _, _, state in members],
            [state[SECOND_MOMENT] for _, _, state in members],
            [],
            [before.clone() for _ in members],
            fused=True,
            found_inf=None if gate.flag is None else (~gate.flag).float().to(device),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _is_ordinary(p: Tensor, state: dict[str, Any]) -> bool:
    tensors = (p, p.grad, state[MOMENTUM], state[SECOND_MOMENT])
    return state[SCALE] == 1.0 and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def _update_one(p: Tensor, state: dict[str, Any], group: dict[str, Any], gate: Gate) -> None:
    beta1, beta2 = group["betas"]
    gradient = gate.gradient(p.grad if state[SCALE] == 1.0 else p.grad / state[SCALE]).to(torch.float32)
    momentum, second_moment = state[MOMENTUM], state[SECOND_MOMENT]
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
