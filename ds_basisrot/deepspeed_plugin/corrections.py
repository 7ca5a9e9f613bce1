"""Known remedies for late gradients, for comparison: PipeDream-LR, delay compensation, weight prediction (the last in WeightVersions)."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..common.blocks import ConfigError


class LearningRateCorrection:
    """lr / max(1, tau / a)^(1 - min(u / N, 1)) in update u of a stage tau microbatches late, a in an update (PipeDream-LR).

    Schedulers and logs see the uncorrected learning rate.

    Args:
        engine: its basic optimizer is the one corrected.
        staleness: tau.
        updates: N.

    Raises:
        ConfigError: the optimizer is not one of torch's kind.
    """

    def __init__(self, engine: Any, staleness: int, updates: int):
        self._engine, self._staleness, self._updates = engine, staleness, updates
        self._uncorrected: list[tuple[dict[str, Any], Any]] = []
        optimizer = engine.basic_optimizer
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise ConfigError(f"pipeline.lr_correction_updates: needs a torch optimizer, got {type(optimizer).__name__}; remove the key")
        optimizer.register_step_pre_hook(self._correct)
        optimizer.register_step_post_hook(self._undo)

    def factor(self) -> float:
        """What the learning rate of the present update is multiplied by."""
        late = max(1.0, self._staleness / self._engine.micro_batches)
        return late ** (min(self._engine.global_steps / self._updates, 1.0) - 1.0)

    def _correct(self, optimizer: Any, *_: Any) -> None:
        factor = self.factor()
        self._uncorrected = [(group, group["lr"]) for group in optimizer.param_groups]
        for group, lr in self._uncorrected:
            group["lr"] = lr * factor

    def _undo(self, *_: Any) -> None:
        for group, lr in self._uncorrected:
            group["lr"] = lr
        self._uncorrected = []


class DelayCompensation:
    """Adds strength g^2 (w_now - w_then) to each microbatch's gradient g, which arrives divided by the accumulation (DC-ASGD).

    Args:
        engine: its microbatches per update are the accumulation.
        strength: lambda.
        newest: w_now of a parameter, which holds w_then inside a backward; None where they are the same.
    """

    def __init__(self, engine: Any, strength: float, newest: Callable[[Tensor], Tensor | None]):
        self._engine, self._strength, self._newest = engine, strength, newest
        self._attached: set[torch.nn.Parameter] = set()

    def attach(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Correct the gradients of these parameters from now on."""
        for p in parameters:
            if p not in self._attached:
                self._attached.add(p)
                p.register_hook(partial(self._corrected, p))

    def _corrected(self, p: torch.nn.Parameter, gradient: Tensor) -> Tensor:
        now = self._newest(p)
        if now is None:
            return gradient
        g = gradient.float()
        return (g + self._strength * self._engine.micro_batches * g * g * (now.float() - p.detach().float())).to(gradient.dtype)
