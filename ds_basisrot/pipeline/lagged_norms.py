"""Gradient norms of an asynchronous pipeline: each stage's own is current, the others' last known ones ride on the messages."""

import torch
from torch import Tensor

STABILIZER = 1e-6
"""Added to a norm before dividing by it, as torch does."""


class LaggedNorms:
    """What one stage knows of all stages' gradient norms, and the norm and factor it clips by.

    Args:
        stage, stages: of the pipeline.
        scope: "stage" clips by the stage's own norm alone, "lagged_global" by that of the vector of all known ones.
        device: of the norms.
    """

    def __init__(self, stage: int, stages: int, scope: str, device: torch.device):
        self._stage, self._lagged = stage, scope == "lagged_global" and stages > 1
        self.fields = torch.zeros(1 + stages, dtype=torch.float32, device=device)
        """What travels with a gradient: a loss, then the norms."""
        self.known = self.fields[1:]
        self.factor = torch.ones((), device=device)
        """What the gradients of the last update were multiplied by."""
        self._mine = torch.arange(stages, device=device) == stage

    def from_previous(self, norms: Tensor) -> None:
        """Take in what came with an activation, `[stages]`: the earlier stages' norms are newer there."""
        if self._lagged:
            self.known[: self._stage] = norms[: self._stage]

    def from_next(self, norms: Tensor) -> None:
        """Take in what came with a gradient, `[stages]`: the later stages' norms are newer there."""
        if self._lagged:
            self.known[self._stage + 1 :] = norms[self._stage + 1 :]

    def total(self, own: Tensor, largest: float) -> Tensor:
        """The norm to clip by, of this stage's own in this update; not finite where that is not. `factor` clips it to `largest`, > 0."""
        total = own
        if self._lagged:
            norms = torch.where(self._mine, own, self.known)
            total = torch.linalg.vector_norm(norms)
            torch.where(norms.isfinite(), norms, self.known, out=self.known)
        if largest > 0:
            self.factor = (largest / (total + STABILIZER)).clamp(max=1.0)
        return total
