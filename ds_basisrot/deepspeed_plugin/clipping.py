"""Clipping of one stage of an asynchronous pipeline, in place of DeepSpeed's, which sums the norms of all stages."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..pipeline.lagged_norms import LaggedNorms


class Clipping:
    """Lets DeepSpeed clip by what one stage knows of all stages' norms.

    Args:
        engine: its gradient_clipping is the largest norm; 0: none.
        norms: of this stage.
    """

    def __init__(self, engine: Any, norms: LaggedNorms):
        self._engine, self._norms = engine, norms
        self.parameters: Sequence[torch.nn.Parameter] = ()
        """The trainable ones of this stage."""

    def attach(self) -> None:
        """Replace what takes norms over several stages."""
        engine, wrapper = self._engine, self._engine.optimizer
        engine.clip_fp32_gradients = self._clip
        group = engine.grid.get_slice_parallel_group()
        if hasattr(wrapper, "model_parallel_group"):
            wrapper.model_parallel_group = group
        if getattr(wrapper, "mpu", None) is not None:
            wrapper.mpu = _StageGrid(wrapper.mpu, group)
        if hasattr(wrapper, "scaled_global_norm"):
            scaled_global_norm = wrapper.scaled_global_norm
            wrapper.scaled_global_norm = lambda *args, **kwargs: self._total(_invalid_as_nan(scaled_global_norm(*args, **kwargs)))
        elif hasattr(wrapper, "get_grads_for_norm"):
            wrapper.get_grads_for_norm = self._one_gradient_of_that_norm(wrapper.get_grads_for_norm)

    def _total(self, own: Tensor) -> Tensor:
        return self._norms.total(own, self._engine.gradient_clipping())

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """Of all gradients, which are on one device: bitwise torch's get_total_norm, without its sorting by device and dtype."""
        if not gradients:
            return torch.zeros((), device=self._engine.device)
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))

    def _clip(self) -> None:
        with_gradient = [p for p in self.parameters if p.grad is not None]
        counted = [p.grad for p in with_gradient if not getattr(p, "ds_pipe_replicated", False)]
        self._engine._global_grad_norm = self._total(self._norm(counted))
        if with_gradient and self._norms.clips:
            torch._foreach_mul_([p.grad for p in with_gradient], self._norms.factor)

    def _one_gradient_of_that_norm(self, get_grads_for_norm: Any) -> Any:
        """DeepSpeed's bf16 optimizer takes the norm of a list of gradients: give it one that has the norm."""

        def get(for_clipping: bool = False) -> Any:
            if for_clipping:
                return get_grads_for_norm(for_clipping=True)
            gradients, of_experts = get_grads_for_norm()
            return [self._total(self._norm(gradients).float()).reshape(1)], of_experts

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
