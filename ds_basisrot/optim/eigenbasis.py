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
NOISE_FLOORS = {torch.float64: 1e-2, torch.float32: 1e-2, torch.float16: 3e-2, torch.bfloat16: 1e-1}

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

    From the eigenvectors of the smaller of the two in float64, whose squared singular values are exact far below `NULL_TOLERANCE`.
    Directions that hold only rounding noise of `gradient_dtype` are replaced by a completion that depends on the spanned subspace alone,
    so that rounding never picks the basis. Returns float32 (U or None, V or None).

    Raises:
        torch.linalg.LinAlgError: the decomposition did not converge.
    """
    m, n = gradient.shape[-2:]
    tolerance = max(NULL_TOLERANCE, 2 * torch.finfo(gradient_dtype).eps)
    bases: tuple[list[Tensor], list[Tensor]] = ([], [])
    for matrix in gradient.reshape(-1, m, n).double():
        factor = matrix if m <= n else matrix.mT
        squares, vectors = torch.linalg.eigh(factor @ factor.mT)
        squares, vectors = squares.flip(-1), vectors.flip(-1)
        vectors = vectors[:, squares > tolerance**2 * squares[0]]
        for on_small_side, side, wanted in ((m <= n, bases[0], left), (m > n, bases[1], right)):
            if wanted:
                side.append(_complete(vectors if on_small_side else orthonormalise(factor.mT @ vectors)))
    shape = gradient.shape[:-2]
    return tuple(torch.stack(side).reshape(*shape, *side[0].shape).float() if side else None for side in bases)


def _complete(columns: Tensor) -> Tensor:
    """`[k, rank]` orthonormal columns and, after them, a fixed random frame projected on what they leave out: `[k, k]`."""
    side, rank = columns.shape
    if rank == side:
        return columns
    frame = torch.randn(side, side - rank, generator=torch.Generator().manual_seed(side), dtype=columns.dtype).to(columns.device)
    for _ in range(2):  # twice is enough for orthogonality
        frame = orthonormalise(frame - columns @ (columns.mT @ frame))
    return torch.cat([columns, frame], dim=-1)


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


def power_step(covariance: Tensor, basis: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """One power iteration and QR: order the columns by their Rayleigh quotients, then basis <- qr((C + damping * mean(diag C) * I) basis).

    Damping leaves directions without any covariance where they are. Returns the basis and the order `[..., k]` of the old columns.
    """
    return _ordered_power_step(covariance @ basis, covariance.diagonal(dim1=-2, dim2=-1).mean(-1), basis, damping)


def power_step_of_momentum(momentum: Tensor, basis: Tensor, left: bool, damping: float) -> tuple[Tensor, Tensor]:
    """`power_step` for one side with M M^T (left) or M^T M (right) in place of the covariance, never formed.

    The paper's bilateral form, U <- qr(M V) and V <- qr(M^T U), has the same fixed points, but presumes that equal columns of U and V are
    partners. Each side by itself needs no partner: the second moment follows its own columns, and damping keeps directions in place.
    """
    factor = momentum if left else momentum.mT
    mean_eigenvalue = factor.square().sum((-2, -1)) / factor.shape[-2]
    return _ordered_power_step(factor @ (factor.mT @ basis), mean_eigenvalue, basis, damping)


def _ordered_power_step(image: Tensor, mean_eigenvalue: Tensor, basis: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    order = torch.argsort((basis * image).sum(-2), dim=-1, descending=True, stable=True)
    shift = (damping * mean_eigenvalue + SMALLEST_SHIFT)[..., None, None]
    return orthonormalise(gather_columns(image + shift * basis, order)), order
