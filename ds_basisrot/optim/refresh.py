"""Which matrices get a new basis at which update: the period and the stagger."""

ALLOCATIONS = ("uniform",)


def offset(index: int, matrices: int, period: int) -> int:
    """Offset of matrix `index` of `matrices` within the refresh period, in updates, such that refreshes are spread evenly over it."""
    return index * period // matrices


def is_due(update: int, period: int, offset: int) -> bool:
    """True when the matrix is refreshed at this `update` (1-based). Update 1 is the cold start, which is not a refresh."""
    return update > 1 and (update + offset) % period == 0
