"""Gradients to measure optimizers with: a decaying spectrum in a fixed basis, partly the same in every update, partly fresh noise."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DECADES = 2.5
"""Over which the root-mean-square of a gradient's coordinates in its own basis falls, from the first to the last."""

SIGNAL_SHARE = 0.3
"""Of the variance, what is the same in every update; the rest is noise with the same covariance."""

RMS = 1e-3


class GradientPool:
    """Gradients of a few updates for the matrices of one block, reused in a cycle; every block begins elsewhere in the cycle.

    A gradient is G = A (sqrt(s) P + sqrt(1 - s) Z) B^T with P fixed and Z fresh, both Gaussian; A and B are orthonormal frames with columns
    scaled down geometrically, so that E[G G^T] and E[G^T G] have eigenbases that an optimizer can find.

    Args:
        shapes: [m, n] of each matrix of a block.
        size: updates until the cycle begins again; choose it longer than a refresh period and without a common divisor with it, so that no
            matrix is refreshed by the same few gradients again and again.
        seed: of the frames and the noise.
        device: where the gradients are kept.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], size: int, seed: int, device: torch.device):
        generator = torch.Generator().manual_seed(seed)
        self._gradients = [[gradient.to(device) for gradient in _sequence(m, n, size, generator)] for m, n in shapes]
        self._size = size

    def fill(self, buffers: Sequence[Sequence[Tensor]], update: int) -> None:
        """Write the gradients of this update (any number) to `buffers[block][matrix]`."""
        for block, matrices in enumerate(buffers):
            for buffer, gradients in zip(matrices, self._gradients):
                buffer.copy_(gradients[(update + block) % self._size])


def _sequence(m: int, n: int, size: int, generator: torch.Generator) -> list[Tensor]:
    left, right = _scaled_frame(m, generator), _scaled_frame(n, generator)
    signal = torch.randn(m, n, generator=generator)
    gradients = []
    for _ in range(size):
        noise = torch.randn(m, n, generator=generator)
        gradient = left @ (math.sqrt(SIGNAL_SHARE) * signal + math.sqrt(1 - SIGNAL_SHARE) * noise) @ right.mT
        gradients.append(gradient.mul_(RMS / gradient.square().mean().sqrt()))
    return gradients


def _scaled_frame(side: int, generator: torch.Generator) -> Tensor:
    """Orthonormal columns `[k, k]`, scaled down geometrically over half of `DECADES`: a matrix has two frames."""
    frame = torch.linalg.qr(torch.randn(side, side, generator=generator)).Q
    return frame * torch.logspace(0, -DECADES / 2, side)
