"""The orthonormal factor of a QR decomposition: blocked Gram-Schmidt where that is fast and as good, Householder reflections otherwise.

Householder QR runs at a third of a processor's matrix-multiply speed. A refresh orthonormalises columns that are already nearly orthogonal,
up to their lengths, for which a blocked modified Gram-Schmidt with Cholesky QR inside narrow panels (columns scaled to unit length first)
is nothing but matrix products: three times as fast. Its loss of orthogonality grows with the condition of the scaled columns. It is
measured: where it exceeds `TOLERANCE`, Gram-Schmidt is applied once more, and where that does not help, Householder reflections to the
original.
"""

import torch
from torch import Tensor

TOLERANCE = 3e-5
"""Largest |Q^T Q x - x| for a vector x of signs that Gram-Schmidt may leave behind."""

MENDABLE = 0.1
"""The same, from which a second pass leads to orthonormal columns."""

# Narrow panels are orthonormalised by themselves; wide ones bound how much of the rest passes through the cache after each.
PANEL_COLUMNS, BLOCK_COLUMNS = 64, 192


def orthonormalise(a: Tensor) -> Tensor:
    """Q of `a` = QR with R's diagonal positive, which makes Q a continuous function of a full-rank `a` `[..., k, j]`, k >= j.

    On a processor, float32 matrices try Gram-Schmidt first. On an accelerator that would make the host wait for the measured orthogonality.
    """
    if a.device.type != "cpu" or a.dtype != torch.float32 or a.shape[-1] <= PANEL_COLUMNS:
        return householder(a)
    if a.ndim > 2:
        return torch.stack([orthonormalise(one) for one in a.flatten(0, -3)]).reshape(a.shape)
    q = gram_schmidt(a)
    loss = orthogonality_loss(q)
    if TOLERANCE < loss <= MENDABLE:
        q = gram_schmidt(q)
        loss = orthogonality_loss(q)
    return q if loss <= TOLERANCE else householder(a)


def householder(a: Tensor) -> Tensor:
    """Q of `a` = QR with R's diagonal positive, by Householder reflections."""
    q, r = torch.linalg.qr(a)
    return q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2).to(q.dtype)


def gram_schmidt(a: Tensor) -> Tensor:
    """Q of `a` `[k, j]` by blocked modified Gram-Schmidt; not finite or not orthonormal where the columns are nearly dependent."""
    q = a.clone()
    _gram_schmidt(q, BLOCK_COLUMNS)
    return q


def orthogonality_loss(q: Tensor) -> float:
    """Largest element of |Q^T Q x - x| for one fixed vector x of signs; not finite where `q` is not."""
    signs = torch.randint(0, 2, (q.shape[-1],), generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1).to(q)
    return (q.mT @ (q @ signs) - signs).abs().amax().item()


def _gram_schmidt(q: Tensor, width: int) -> None:
    """Orthonormalise the columns of `q` in place, `width` at a time."""
    for start in range(0, q.shape[-1], width):
        panel, rest = q[:, start : start + width], q[:, start + width :]
        if panel.shape[-1] > PANEL_COLUMNS:
            _gram_schmidt(panel, PANEL_COLUMNS)
        else:
            _cholesky_qr(panel)
        if rest.shape[-1]:
            rest.addmm_(panel, panel.mT @ rest, alpha=-1)


def _cholesky_qr(panel: Tensor) -> None:
    """panel <- panel D (L^-T) with D the inverse lengths of its columns and L L^T = D panel^T panel D."""
    gram = panel.mT @ panel
    inverse_lengths = gram.diagonal().rsqrt()
    lower, _ = torch.linalg.cholesky_ex(gram * inverse_lengths * inverse_lengths[:, None])
    panel.copy_(panel @ torch.linalg.solve_triangular(lower, inverse_lengths.diag(), upper=False).mT)
