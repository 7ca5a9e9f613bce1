"""Estimates of a weight matrix's eigenbasis: source (second or first order) x geometry, cold start and warm refresh.

Every function takes batched matrices `[..., m, n]`. A basis holds its vectors in columns: U is `[..., m, m]`, V is `[..., n, n]`.
"""

import torch
from torch import Tensor

SOURCES = ("second_order", "first_order")
GEOMETRIES = ("bilateral", "unilateral")

# Singular directions of the first gradient below this fraction of the largest one are rounding noise of a float32 gradient.
NULL_TOLERANCE = 3e-6

# Well above the rounding noise of rotated gradients of each precision, well below the coordinates that matter: at a small scale, floors of
# 0.001 to 0.1 left the held-out loss where it was.
NOISE_FLOORS = {torch.float64: 1e-2, torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 3e-2}

# Keeps a basis in place when there is nothing to rotate it by (all-zero momentum or covariance).
SMALLEST_SHIFT = 1e-36


def rotated_sides(shape: torch.Size, geometry: str, max_dim: int) -> tuple[bool, bool]:
    """Which sides (left, right) of a matrix `[..., m, n]` are rotated: both, or the smaller one; never one larger than `max_dim`."""
    m, n = shape[-2:]
    left, right = (True, True) if geometry == "bilateral" else (m < n, m >= n)
    return left and m <= max_dim, right and n <= max_dim


def default_noise_floor(gradient_dtype: torch.dtype) -> float:
    """Smallest trusted second-moment root of a rotated coordinate, relative to their RMS, for gradients of this precision."""
    return NOISE_FLOORS.get(gradient_dtype, NOISE_FLOORS[torch.float32])


def cold_start(
    gradient: Tensor, left: bool, right: bool, gradient_dtype: torch.dtype = torch.float32
) -> tuple[Tensor | None, Tensor | None]:
    """First basis: the singular vectors of the first gradient `[..., m, n]`, which diagonalise G G^T and G^T G alike.

    Computed in float64. Directions that hold only rounding noise of `gradient_dtype` are replaced by a completion that depends on the
    spanned subspace alone, so that rounding never picks the basis. Returns float32 (U or None, V or None).

    Raises:
        torch.linalg.LinAlgError: the decomposition did not converge.
    """
    shape = gradient.shape
    matrices = gradient.reshape(-1, *shape[-2:]).double()
    tolerance = max(NULL_TOLERANCE, 2 * torch.finfo(gradient_dtype).eps)
    left_bases, right_bases = [], []
    for matrix in matrices:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=True)
        rank = int((s > tolerance * s[0]).sum())
        if left:
            left_bases.append(_complete(u, rank))
        if right:
            right_bases.append(_complete(vh.mT, rank))

    def stack(bases: list[Tensor]) -> Tensor | None:
        return torch.stack(bases).reshape(*shape[:-2], *bases[0].shape).float() if bases else None

    return stack(left_bases), stack(right_bases)


def _complete(basis: Tensor, rank: int) -> Tensor:
    """Replace columns `rank:` of an orthogonal `[k, k]` by a frame fixed by their span: a constant random one, projected on it."""
    side = basis.shape[-1]
    if rank >= side:
        return basis
    null = basis[:, rank:]
    frame = torch.randn(side, side - rank, generator=torch.Generator().manual_seed(side), dtype=basis.dtype).to(basis.device)
    return torch.cat([basis[:, :rank], null @ orthonormalise(null.mT @ frame)], dim=-1)


def orthonormalise(a: Tensor) -> Tensor:
    """Q of `a` = QR with R's diagonal positive, which makes Q a continuous function of a full-rank `a` `[..., k, j]`, k >= j."""
    q, r = torch.linalg.qr(a)
    return q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2).to(q.dtype)


def gather_columns(matrix: Tensor, order: Tensor) -> Tensor:
    """Columns of `[..., m, k]` in the order `[..., k]` (batched indexing)."""
    return matrix.gather(-1, order.unsqueeze(-2).expand(*matrix.shape[:-1], order.shape[-1]))


def gather_rows(matrix: Tensor, order: Tensor) -> Tensor:
    """Rows of `[..., k, n]` in the order `[..., k]` (batched indexing)."""
    return matrix.gather(-2, order.unsqueeze(-1).expand(*order.shape, matrix.shape[-1]))


def _descending(scores: Tensor) -> Tensor:
    return torch.argsort(scores, dim=-1, descending=True, stable=True)


def power_step(covariance: Tensor, basis: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """One power iteration and QR: order the columns by their Rayleigh quotients, then basis <- qr((C + damping * mean(diag C) * I) basis).

    Damping leaves directions without any covariance where they are. Returns the basis and the order `[..., k]` of the old columns.
    """
    return _ordered_power_step(covariance @ basis, covariance.diagonal(dim1=-2, dim2=-1).mean(-1), basis, damping)


def power_step_of_momentum(momentum: Tensor, basis: Tensor, left: bool, damping: float) -> tuple[Tensor, Tensor]:
    """`power_step` for one side with M M^T (left) or M^T M (right) in place of the covariance, never formed."""
    factor = momentum if left else momentum.mT
    mean_eigenvalue = factor.square().sum((-2, -1)) / factor.shape[-2]
    return _ordered_power_step(factor @ (factor.mT @ basis), mean_eigenvalue, basis, damping)


def _ordered_power_step(image: Tensor, mean_eigenvalue: Tensor, basis: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    order = _descending((basis * image).sum(-2))
    shift = (damping * mean_eigenvalue + SMALLEST_SHIFT)[..., None, None]
    return orthonormalise(gather_columns(image + shift * basis, order)), order


def cross_power_step(momentum: Tensor, u: Tensor, v: Tensor, damping: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First order, bilateral: U <- qr(M V), V <- qr(M^T U_old), columns ordered by the norms of M V and M^T U_old.

    Only the first min(m, n) columns of U and V are paired and re-ordered; the others span a null space of M and keep their place.
    Returns (U, V, order of U's old columns, order of V's old columns).
    """
    paired = min(momentum.shape[-2:])
    shift = damping**0.5 * (momentum.square().sum((-2, -1), keepdim=True) / paired).sqrt() + SMALLEST_SHIFT
    new_u, order_u = _cross_side((momentum @ v)[..., :paired], u, shift)
    new_v, order_v = _cross_side((momentum.mT @ u)[..., :paired], v, shift)
    return new_u, new_v, order_u, order_v


def _cross_side(image: Tensor, basis: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    paired, side = image.shape[-1], basis.shape[-1]
    old, rest = basis[..., :paired], basis[..., paired:]
    order = _descending(image.square().sum(-2))
    columns = torch.cat([gather_columns(image + shift * old, order), rest], dim=-1)
    kept = torch.arange(paired, side, device=basis.device).expand(*order.shape[:-1], side - paired)
    return orthonormalise(columns), torch.cat([order, kept], dim=-1)
