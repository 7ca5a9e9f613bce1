"""Gradient norms within one stage: no collective spans the stages of an asynchronous pipeline (clip_scope "stage")."""

from typing import Any

import torch


def clip_by_stage(engine: Any) -> None:
    """Clip the gradients of this stage to the JSON's gradient_clipping by their own norm."""
    parameters = [p for p in engine.module.parameters() if p.grad is not None]
    if parameters:
        torch.nn.utils.clip_grad_norm_(parameters, engine.gradient_clipping())
