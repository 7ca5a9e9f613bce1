"""Linear warm-up, then half a cosine down to a tenth, as a function of the number of updates."""

import math

FINAL_FRACTION = 0.1


class WarmupCosine:
    """A learning-rate scheduler as DeepSpeed steps it: once per update, each group's own rate being the peak.

    The rate depends on the update's number only, so a resumed run follows the flags it is given now, also where they name
    another peak or another number of updates than the run that saved.
    """

    def __init__(self, optimizer, warmup_updates: int, total_updates: int):
        self._optimizer = optimizer
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._warmup, self._total = warmup_updates, total_updates
        self._updates = 0
        self.apply()

    def fraction(self, update: int) -> float:
        """The share of the peak rate that update number `update` (0-based) is made with."""
        if update < self._warmup:
            return (update + 1) / self._warmup
        progress = min(1.0, (update - self._warmup) / max(1, self._total - self._warmup))
        return FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress))

    def apply(self) -> None:
        """Write the rate of the next update into the optimizer, which a loaded checkpoint may have changed."""
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * self.fraction(self._updates)

    def step(self) -> None:
        self._updates += 1
        self.apply()

    def state_dict(self) -> dict[str, int]:
        return {"updates": self._updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._updates = state["updates"]
        self.apply()
