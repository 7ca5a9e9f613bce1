"""Adam's moments in the rotated basis and the direction they give, whose denominators have a floor."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .gradient_gate import Gate

FEWEST_FUSED = 1 << 13
"""Elements above which one pass over memory saves more than torch's way to its kernel costs."""


class Adam(NamedTuple):
    """Options of one update.

    Attributes:
        betas, eps, learning_rate: Adam's.
        floor: smallest root of a second moment that is trusted, relative to their RMS over the matrix; 0: all are.
        step: number of this update, from 1.
    """

    betas: tuple[float, float]
    eps: float
    learning_rate: float
    floor: float
    step: int


def update(gradient: Tensor, momentum: Tensor, second_moment: Tensor, options: Adam, gate: Gate) -> tuple[Tensor, float]:
    """Let the moments M and S take in a gradient, all float32 `[(b,) m, n]`.

        X = M / (max(sqrt(S), floor sqrt(mean(S))) + eps),    step size = learning rate sqrt(1 - beta2^step) / (1 - beta1^step)

    The method adds eps to the root before its bias correction, AdamW after it.

    Returns:
        (X, step size): the rotated weight changes by -step size * X; X is the caller's.
    """
    fused = (
        gate.flag is None
        and gradient.numel() > FEWEST_FUSED
        and all(t.device.type == "cpu" and t.is_contiguous() for t in (gradient, momentum, second_moment))
    )
    return (_update_fused if fused else _update)(gradient, momentum, second_moment, options, gate)


def root(second_moment: Tensor, floor: float) -> Tensor:
    """max(sqrt(S), floor sqrt(mean(S))) for S `[(b,) m, n]`, a new tensor."""
    if floor == 0.0:
        return second_moment.sqrt()
    smallest = second_moment.mean((-2, -1), keepdim=True).mul_(floor**2)
    return second_moment.clamp(min=smallest).sqrt_()


def _update(gradient: Tensor, momentum: Tensor, second_moment: Tensor, options: Adam, gate: Gate) -> tuple[Tensor, float]:
    beta1, beta2 = options.betas
    momentum.lerp_(gradient, gate.amount(1 - beta1))
    second_moment.mul_(gate.decay(beta2)).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = root(second_moment, options.floor)
    step_size = options.learning_rate * math.sqrt(1 - beta2**options.step) / (1 - beta1**options.step)
    return torch.div(momentum, denominator.add_(options.eps), out=denominator), step_size


def _update_fused(gradient: Tensor, momentum: Tensor, second_moment: Tensor, options: Adam, _: Gate) -> tuple[Tensor, float]:
    """The same in one pass of torch's fused kernel, which corrects the bias in X itself.

    X starts at zero and moves by a learning rate of -1; AMSGrad's largest second moment so far starts at the floor's square, which is known
    in advance: mean(S) is a mean of the last one and of the gradient's squares.
    """
    beta1, beta2 = options.betas
    mean_square = torch.linalg.vector_norm(gradient, dim=(-2, -1), keepdim=True).square_().div_(gradient.shape[-2] * gradient.shape[-1])
    mean = second_moment.mean((-2, -1), keepdim=True).lerp_(mean_square, 1 - beta2)
    x, smallest = torch.zeros_like(gradient), torch.empty_like(gradient).copy_(mean.mul_(options.floor**2).expand_as(gradient))
    adamw(
        [x],
        [gradient],
        [momentum],
        [second_moment],
        [smallest],
        [torch.full((), options.step - 1.0)],
        fused=True,
        amsgrad=True,
        beta1=beta1,
        beta2=beta2,
        lr=-1.0,
        weight_decay=0.0,
        eps=options.eps / math.sqrt(1 - beta2**options.step),
        maximize=False,
    )
    return x, options.learning_rate
