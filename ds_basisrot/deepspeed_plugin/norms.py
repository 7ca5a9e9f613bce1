"""Gradient norms within one stage: no collective spans the stages of an asynchronous pipeline (clip_scope "stage")."""

from typing import Any

import torch


def clip_by_stage(engine: Any) -> None:
    """Clip the gradients of this stage to the JSON's gradient_clipping by their own norm."""
    parameters = [p for p in engine.module.parameters() if p.grad is not None]
    if parameters:
        torch.nn.utils.clip_grad_norm_(parameters, engine.gradient_clipping())


def keep_norms_within_stage(engine: Any) -> None:
    """Let DeepSpeed's wrappers around the optimizer take norms over this stage alone; by themselves they reduce over all stages."""
    wrapper, group = engine.optimizer, engine.grid.get_slice_parallel_group()
    if hasattr(wrapper, "model_parallel_group"):
        wrapper.model_parallel_group = group
    if getattr(wrapper, "mpu", None) is not None:
        wrapper.mpu = _StageGrid(wrapper.mpu, group)


class _StageGrid:
    """A pipeline's grid whose model-parallel group is that of one stage."""

    def __init__(self, grid: Any, group: Any):
        self._grid, self._group = grid, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_model_parallel_group(self) -> Any:
        return self._group
