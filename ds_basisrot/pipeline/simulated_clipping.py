"""Whose norms each simulated stage clips by, from the whole history of all stages' norms."""

from collections.abc import Sequence

import torch
from torch import Tensor

CLIP_SCOPES = ("lagged_global", "stage")


class ClipHistory:
    """Norms and clip factors of every stage and update.

    With the scope "stage" a stage clips by its own norm. With "lagged_global" it clips by the norm of the vector of all stages' norms: its
    own of this update, and of each other stage the last finite one of those updates that it has heard of, 0 if there is none.

    Args:
        stages: pipeline stages P.
        max_norm: gradients are clipped to it; 0 does not clip.
        scope: one of `CLIP_SCOPES`.

    Attributes:
        norms: `[stage][update]`, each stage's norm over its own gradients before clipping, as it was, finite or not.
        factors: `[stage][update]`, what the stage's gradients were multiplied by: min(1, max_norm / (N + 1e-6)), rounded to float32.
    """

    def __init__(self, stages: int, max_norm: float, scope: str):
        if scope not in CLIP_SCOPES:
            raise ValueError(f"clip_scope: must be one of {', '.join(CLIP_SCOPES)}, got {scope!r}")
        self.max_norm, self.scope = max_norm, scope
        self.norms: list[list[Tensor]] = [[] for _ in range(stages)]
        self.factors: list[list[Tensor]] = [[] for _ in range(stages)]

    def clip(self, gradients: Sequence[Sequence[Tensor]], heard: Sequence[Sequence[int]]) -> None:
        """Clip the gradients of one update of every stage, in place.

        Args:
            gradients: of each stage.
            heard: `heard[k][j]`: of how many updates of stage j stage k has heard, for j other than k.
        """
        own = [torch.nn.utils.get_total_norm(each) for each in gradients]
        for k, each in enumerate(gradients):
            norm = own[k] if self.scope == "stage" else self._lagged_norm(k, own[k], heard[k])
            factor = torch.ones(())
            if self.max_norm > 0:
                factor = torch.clamp(torch.tensor(self.max_norm, dtype=torch.float64) / (norm.float().double() + 1e-6), max=1.0).float()
            self.factors[k].append(factor)
            if self.max_norm > 0:
                for gradient in each:
                    gradient.mul_(factor)
        for norms, norm in zip(self.norms, own):
            norms.append(norm)

    def _lagged_norm(self, stage: int, own: Tensor, heard: Sequence[int]) -> Tensor:
        parts = [own if j == stage else last_finite(norms[: heard[j]]) for j, norms in enumerate(self.norms)]
        return torch.linalg.vector_norm(torch.stack([part.to(own.device, torch.float64) for part in parts])).float()


def last_finite(norms: Sequence[Tensor]) -> Tensor:
    """The last norm that is neither infinite nor NaN, 0 if there is none."""
    return next((norm for norm in reversed(norms) if norm.isfinite()), torch.zeros(()))
