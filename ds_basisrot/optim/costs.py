"""What a rotated matrix costs: numbers of state, multiply-adds of an update and of a refresh, as formulas of its shape."""

from dataclasses import dataclass
from functools import lru_cache

from .symmetric import packed_size


@dataclass(frozen=True)
class MatrixCost:
    """Costs of one weight matrix `[m, n]`, rotated on `sides` (left, right).

    Attributes:
        moment_numbers: numbers in the momentum, and again in the second moment.
        basis_numbers: numbers in the bases: m^2 and n^2 for the rotated sides.
        covariance_numbers: numbers in the packed covariances, a little over half of `basis_numbers`; none with the first order.
        update_madds: multiply-adds of an update without a refresh: two two-sided rotations and the covariances.
        refresh_madds: multiply-adds of a refresh: power step, QR (2 k^3 flops for Gram-Schmidt), the momentum into the new basis.
    """

    moment_numbers: int
    basis_numbers: int
    covariance_numbers: int
    update_madds: int
    refresh_madds: int


@lru_cache
def matrix_cost(m: int, n: int, sides: tuple[bool, bool], second_order: bool) -> MatrixCost:
    """Costs of a matrix `[m, n]`; see `MatrixCost`."""
    lengths = [(side, other) for side, other, rotated in ((m, n, sides[0]), (n, m, sides[1])) if rotated]
    rotation = sum(m * n * side for side, _ in lengths)
    image = sum(side**3 if second_order else 2 * side * side * other for side, other in lengths)
    return MatrixCost(
        moment_numbers=m * n,
        basis_numbers=sum(side * side for side, _ in lengths),
        covariance_numbers=sum(packed_size(side) for side, _ in lengths) if second_order else 0,
        update_madds=2 * rotation + (sum(packed_size(side) * other for side, other in lengths) if second_order else 0),
        refresh_madds=image + sum(side**3 for side, _ in lengths) + 2 * rotation,
    )


def state_bytes(cost: MatrixCost, state_dtype: str) -> int:
    """Bytes of one matrix's state tensors: `state_dtype` for momentum and bases, float32 for second moment and covariances."""
    width = 2 if state_dtype == "bfloat16" else 4
    return width * (cost.moment_numbers + cost.basis_numbers) + 4 * (cost.moment_numbers + cost.covariance_numbers)
