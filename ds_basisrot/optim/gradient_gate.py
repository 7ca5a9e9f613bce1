"""Lets gradients through to the states, or not, without making an accelerator wait for the host."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Gate:
    """What one update may do: everything (`flag` None), or what a flag on the device says, which the host does not know yet.

    With the flag false nothing changes: gradients become zero, decays one, step sizes zero.
    """

    def __init__(self, flag: Tensor | None = None):
        self.flag = flag

    def gradient(self, gradient: Tensor) -> Tensor:
        """The gradient, or zeros."""
        return gradient if self.flag is None else torch.where(self.flag, gradient, 0.0)

    def decay(self, factor: float, dtype: torch.dtype = torch.float32) -> float | Tensor:
        """The factor, or one; `dtype` is that of what decays, as 1 - 1e-8 is one in single precision."""
        if self.flag is None:
            return factor
        return torch.where(self.flag, torch.full((), factor, dtype=dtype, device=self.flag.device), 1.0)

    def amount(self, amount: float) -> float | Tensor:
        """The amount, or zero."""
        return amount if self.flag is None else torch.where(self.flag, amount, 0.0)

    def choose(self, fresh: Tensor, old: Tensor) -> Tensor:
        """`fresh`, or `old`."""
        return fresh if self.flag is None else torch.where(self.flag, fresh, old)


OPEN = Gate()


def largest_elements(gradients: Sequence[Tensor]) -> Tensor:
    """The largest magnitude in each gradient, NaN where there is one: float64 `[k]` on the first one's device.

    Raises:
        RuntimeError: a sparse gradient.
    """
    if all(g.device.type == "cpu" for g in gradients):
        return _extremes(gradients).double().abs().view(-1, 2).amax(-1)
    _refuse_sparse(gradients)
    norms = torch._foreach_norm(gradients, math.inf)
    return torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms])


def largest_elements_on_host(gradients: Sequence[Tensor]) -> list[float]:
    """The same of gradients on a processor, as numbers.

    Raises:
        RuntimeError: a sparse gradient.
    """
    extremes = _extremes(gradients).tolist()
    return [max(-least, most) for least, most in zip(extremes[::2], extremes[1::2])]


def _extremes(gradients: Sequence[Tensor]) -> Tensor:
    """Least and largest element of each, `[2k]`, by the one operation for it that is vectorised on a processor."""
    try:
        return torch.stack([extreme for g in gradients for extreme in torch.aminmax(g)])
    except NotImplementedError:
        _refuse_sparse(gradients)
        raise


def _refuse_sparse(gradients: Sequence[Tensor]) -> None:
    if any(g.is_sparse for g in gradients):
        raise RuntimeError("BasisRotation does not take sparse gradients: use sparse=False in nn.Embedding")


class Outcome:
    """Largest elements of one update's gradients on their way to the host, where they are looked at in the next update."""

    def __init__(self, sizes: Tensor):
        if sizes.device.type == "cpu":
            self._sizes, self._arrived = sizes.clone(), None
        else:
            self._sizes = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True).copy_(sizes, non_blocking=True)
            self._arrived = torch.Event(device=sizes.device)
            self._arrived.record()

    def read(self) -> list[float]:
        """The sizes. The copy was started an update ago, so that nothing of the present one is waited for."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._sizes.tolist()
