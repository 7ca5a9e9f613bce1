"""Gradient norms of an asynchronous pipeline: each stage's own is current, the others' last known ones ride on the messages."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

STABILIZER = 1e-6
"""Added to a norm before dividing by it, as torch does."""


class Norms:
    """What one stage knows of all stages' gradient norms, and the norm and factor it clips by.

    Args:
        engine: its gradient_clipping is the largest norm; 0: none.
        stage, stages: of the pipeline.
        scope: "stage" clips by the stage's own norm alone, "lagged_global" by that of the vector of all known ones.
    """

    def __init__(self, engine: Any, stage: int, stages: int, scope: str):
        self._engine, self._stage, self._lagged = engine, stage, scope == "lagged_global" and stages > 1
        self.fields = torch.zeros(1 + stages, dtype=torch.float32, device=engine.device)
        """What travels with a gradient: a loss, then the norms."""
        self.known = self.fields[1:]
        self.factor = torch.ones((), device=engine.device)
        """What the gradients of the last update were multiplied by."""
        self.parameters: Sequence[torch.nn.Parameter] = ()
        """The trainable ones of this stage."""
        self._mine = torch.arange(stages, device=engine.device) == stage

    def from_previous(self, norms: Tensor) -> None:
        """Take in what came with an activation, `[stages]`: the earlier stages' norms are newer there."""
        if self._lagged:
            self.known[: self._stage] = norms[: self._stage]

    def from_next(self, norms: Tensor) -> None:
        """Take in what came with a gradient, `[stages]`: the later stages' norms are newer there."""
        if self._lagged:
            self.known[self._stage + 1 :] = norms[self._stage + 1 :]

    def total(self, own: Tensor) -> Tensor:
        """The norm to clip by, of this stage's own in this update; not finite where that is not."""
        total = own
        if self._lagged:
            norms = torch.where(self._mine, own, self.known)
            total = torch.linalg.vector_norm(norms)
            torch.where(norms.isfinite(), norms, self.known, out=self.known)
        if self._engine.gradient_clipping() > 0:
            self.factor = (self._engine.gradient_clipping() / (total + STABILIZER)).clamp(max=1.0)
        return total

    def attach(self) -> None:
        """Let DeepSpeed clip by `total`, and take no norm over several stages."""
        engine, wrapper = self._engine, self._engine.optimizer
        engine.clip_fp32_gradients = self._clip
        group = engine.grid.get_slice_parallel_group()
        if hasattr(wrapper, "model_parallel_group"):
            wrapper.model_parallel_group = group
        if getattr(wrapper, "mpu", None) is not None:
            wrapper.mpu = _StageGrid(wrapper.mpu, group)
        if hasattr(wrapper, "scaled_global_norm"):
            scaled_global_norm = wrapper.scaled_global_norm
            wrapper.scaled_global_norm = lambda *args, **kwargs: self.total(_invalid_as_nan(scaled_global_norm(*args, **kwargs)))
        elif hasattr(wrapper, "get_grads_for_norm"):
            wrapper.get_grads_for_norm = self._one_gradient_of_that_norm(wrapper.get_grads_for_norm)

    def _clip(self) -> None:
        with_gradient = [p for p in self.parameters if p.grad is not None]
        counted = [p.grad for p in with_gradient if not getattr(p, "ds_pipe_replicated", False)]
        own = torch.nn.utils.get_total_norm(counted) if counted else torch.zeros((), device=self._engine.device)
        self._engine._global_grad_norm = self.total(own)
        if with_gradient:
            torch._foreach_mul_([p.grad for p in with_gradient], self.factor)

    def _one_gradient_of_that_norm(self, get_grads_for_norm: Any) -> Any:
        """DeepSpeed's bf16 optimizer takes the norm of a list of gradients: give it one that has the norm."""

        def get(for_clipping: bool = False) -> Any:
            if for_clipping:
                return get_grads_for_norm(for_clipping=True)
            gradients, of_experts = get_grads_for_norm()
            own = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self._engine.device)
            return [self.total(own.float()).reshape(1)], of_experts

        return get


def _invalid_as_nan(norm: Tensor) -> Tensor:
    """DeepSpeed writes -1 for a norm that is not finite."""
    return torch.where(norm < 0, torch.nan, norm)


class _StageGrid:
    """A pipeline's grid whose model-parallel group is that of one stage."""

    def __init__(self, grid: Any, group: Any):
        self._grid, self._group = grid, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_model_parallel_group(self) -> Any:
        return self._group
