"""Gradient norms of an asynchronous pipeline: each stage's own is current, the others' last known ones ride on the messages."""

import math

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
        self.factor = torch.ones((), dtype=torch.float32, device=device)
        """What the gradients of the last update were multiplied by."""
        self.clips = True
        """Of the last update; False where the host knows that the factor is one."""
        self._on_host = self.known.device.type == "cpu"
        self._mine = torch.arange(stages, device=device) == stage
        self._earlier, self._own, self._later = self.known[:stage], self.known[stage : stage + 1], self.known[stage + 1 :]
        self._one = self.factor

    def from_previous(self, norms: Tensor) -> None:
        """Take in what came with an activation, `[stages]`: the earlier stages' norms are newer there."""
        if self._lagged:
            self._earlier.copy_(norms[: self._stage])

    def from_next(self, norms: Tensor) -> None:
        """Take in what came with a gradient, `[stages]`: the later stages' norms are newer there."""
        if self._lagged:
            self._later.copy_(norms[self._stage + 1 :])

    def total(self, own: Tensor, largest: float) -> Tensor:
        """The norm to clip by, of this stage's own in this update; not finite where that is not. `factor` clips it to `largest`, > 0."""
        return self._total_on_host(own.item(), largest) if self._on_host else self._total_on_device(own, largest)

    def _total_on_device(self, own: Tensor, largest: float) -> Tensor:
        total = own
        if self._lagged:
            norms = torch.where(self._mine, own, self.known)
            total = torch.linalg.vector_norm(norms)
            torch.where(norms < math.inf, norms, self.known, out=self.known)
        if largest > 0:
            self.factor = (largest / (total + STABILIZER)).clamp(max=1.0)
        return total

    def _total_on_host(self, own: float, largest: float) -> Tensor:
        """In numbers: a dozen operations on tensors of a few bytes take longer than all else in a small update."""
        total = own
        if self._lagged:
            norms = self.known.tolist()
            norms[self._stage] = own
            total = math.sqrt(sum(norm * norm for norm in norms))
            if math.isfinite(own):
                self._own.fill_(own)
        rounded = torch.tensor(total, dtype=torch.float32)
        if largest > 0:
            factor = largest / (rounded.item() + STABILIZER)
            self.clips = not factor >= 1.0
            self.factor = torch.tensor(factor, dtype=torch.float32) if self.clips else self._one
        return rounded
