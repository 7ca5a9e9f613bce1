"""Estimates of a weight matrix's eigenbasis: source (second or first order) x geometry, cold start and warm refresh.

Every function takes batched matrices `[..., m, n]`. A basis holds its vectors in columns: U is `[..., m, m]`, V is `[..., n, n]`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .orthonormal import householder, orthonormalise

SOURCES = ("second_order", "first_order")
GEOMETRIES = ("bilateral", "unilateral", "auto")

# Singular directions of the first gradient below this fraction of the largest one are rounding noise of a float32 gradient.
NULL_TOLERANCE = 3e-6

# Well above the rounding noise of rotated gradients of each precision, well below the coordinates that matter: at a small scale, floors of
# 0.001 to 0.1 left the held-out loss where it was.
NOISE_FLOORS = {torch.float64: 1e-2, torch.float32: 1e-2, torch.float16: 3e-2, torch.bfloat16: 1e-1}

ROWS_AT_A_TIME = 64

# Keep a basis in place when there is nothing to rotate it by (all-zero momentum or covariance).
SMALLEST_EIGENVALUE, SMALLEST_SHIFT = 1e-36, 1e-12


def rotated_sides(shape: Sequence[int], geometry: str, max_dim: int, auto_budget: float) -> tuple[bool, bool]:
    """Which sides (left, right) of a matrix `[..., m, n]` are rotated; never one longer than `max_dim`.

    Rotating a side of length k costs k multiply-adds per weight and product. "bilateral" rotates both sides, "unilateral" the shorter one,
    "auto" the shorter one, and the longer one if that costs less than `auto_budget` times as much.
    """
    m, n = shape[-2:]
    if geometry == "bilateral" or (geometry == "auto" and max(m, n) < auto_budget * min(m, n)):
        left = right = True
    else:
        left, right = m < n, m >= n
    return left and m <= max_dim, right and n <= max_dim


def cold_tolerance(noise_floor: float, gradient_dtype: torch.dtype) -> float:
    """Relative size of the first gradient's singular values below which their vectors are not trusted."""
    return max(noise_floor / 10, NULL_TOLERANCE, 2 * torch.finfo(gradient_dtype).eps)


def default_noise_floor(gradients: torch.dtype, products: torch.dtype) -> float:
    """Smallest trusted second-moment root of a rotated coordinate, relative to their RMS, where these have these precisions."""
    return max(NOISE_FLOORS.get(gradients, NOISE_FLOORS[torch.float32]), NOISE_FLOORS[products])


def cold_start(gradient: Tensor, left: bool, right: bool, tolerance: float = NULL_TOLERANCE) -> tuple[Tensor | None, Tensor | None]:
    """First basis: the singular vectors of the first gradient `[..., m, n]`, which diagonalise G G^T and G^T G alike.

    From the eigenvectors of the smaller of the two in float64, whose squared singular values are exact far below `NULL_TOLERANCE`.
    Directions whose singular value is below `tolerance`, relative to the largest, hold rounding noise; they give way to those of a fixed
    random frame, with weights that change smoothly from one to the other, so that rounding never picks the basis:

        column i of the basis = column i of qr( w_i v_i (v_i . f_i) + (1 - w_i) f_i ),    w_i = s_i^4 / (s_i^4 + tolerance^4)

    Returns float32 (U or None, V or None).

    Raises:
        torch.linalg.LinAlgError: the decomposition did not converge.
    """
    m, n = gradient.shape[-2:]
    bases: tuple[list[Tensor], list[Tensor]] = ([], [])
    for matrix in gradient.reshape(-1, m, n).double():
        factor = matrix if m <= n else matrix.mT
        squares, vectors = torch.linalg.eigh(factor @ factor.mT)
        squares, vectors = squares.flip(-1).clamp_min(0.0), vectors.flip(-1)
        lengths = squares.sqrt()
        sizes = lengths / lengths[0].clamp_min(torch.finfo(torch.float64).tiny)
        weights = sizes**4 / (sizes**4 + tolerance**4)
        for on_small_side, side, wanted in ((m <= n, bases[0], left), (m > n, bases[1], right)):
            if wanted:
                roots = weights.sqrt()
                columns = vectors * roots if on_small_side else factor.mT @ vectors * (roots / lengths.clamp_min(1e-300))
                side.append(_with_frame(columns, weights))
    shape = gradient.shape[:-2]
    return tuple(torch.stack(side).reshape(*shape, *side[0].shape).float() if side else None for side in bases)


def _with_frame(columns: Tensor, weights: Tensor) -> Tensor:
    """Orthonormal `[k, k]` from `[k, j]` columns whose squared lengths are `weights` and, for what they leave out, a fixed random frame."""
    side, rank = columns.shape
    frame = torch.randn(side, side, generator=torch.Generator().manual_seed(side), dtype=columns.dtype).to(columns.device)
    known = frame[:, :rank]
    known.copy_(columns * (columns * known).sum(0) + (1 - weights) * known)  # does not depend on the columns' signs
    return householder(frame)


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
    order = torch.argsort(_columns_products(basis, image), dim=-1, descending=True, stable=True)
    image.div_(mean_eigenvalue.clamp_min(SMALLEST_EIGENVALUE)[..., None, None]).add_(basis, alpha=damping + SMALLEST_SHIFT)
    image.copy_(gather_columns(image, order))  # large temporaries are few and short: memory fresh from the system is slow
    return orthonormalise(image), order


def _columns_products(a: Tensor, b: Tensor) -> Tensor:
    """The products a_i . b_i of equal columns of two `[..., k, j]`, some rows at a time."""
    return sum((some * others).sum(-2) for some, others in zip(a.split(ROWS_AT_A_TIME, -2), b.split(ROWS_AT_A_TIME, -2)))
