"""Gradient norms within one stage: no collective spans the stages of an asynchronous pipeline (clip_scope "stage")."""

from typing import Any

import torch


def keep_norms_within_stage(engine: Any) -> None:
    """Make the engine, and the bf16 wrapper of its optimizer, clip by the norm of this stage's own gradients."""

    def clip() -> None:
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        if parameters:
            torch.nn.utils.clip_grad_norm_(parameters, engine.gradient_clipping())

    engine.clip_fp32_gradients = clip
    if engine.using_bf16_optimizer:
        engine.optimizer.mpu = _OneStage(engine.mpu)


class _OneStage:
    """DeepSpeed's grid, but for its "model parallel" group, which spans all stages: here it ends at this stage."""

    def __init__(self, grid: Any):
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_model_parallel_group(self) -> Any:
        return self._grid.get_slice_parallel_group()

    def get_model_parallel_world_size(self) -> int:
        return self._grid.get_slice_parallel_world_size()

    def get_model_parallel_rank(self) -> int:
        return self._grid.get_slice_parallel_rank()
