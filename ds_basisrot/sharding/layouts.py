"""Where the elements of parameters lie when a data-parallel group shares them: arithmetic of the two ways in which ZeRO cuts them."""

from collections.abc import Sequence

from .units import Piece

ALIGNMENT = 2
"""Elements: each rank's part of a flat buffer is a multiple of it."""


def cut_in_buffer(first: int, numel: int, size: int) -> tuple[Piece, ...]:
    """Slices of a parameter in a flat buffer that is cut into one part for each rank, as with ZeRO 1 and 2.

    Args:
        first: place of its first element in the buffer of all ranks.
        numel: its elements.
        size: elements of a part.
    """
    ranks = range(first // size, -(-(first + numel) // size)) if numel else ()
    cuts = [(rank, max(first, rank * size), min(first + numel, (rank + 1) * size)) for rank in ranks]
    return tuple(Piece(rank, begin - rank * size, begin - first, end - begin) for rank, begin, end in cuts)


def cut_by_itself(numel: int, ranks: int, start: int) -> tuple[Piece, ...]:
    """Slices of a parameter that is cut into equal chunks, the last of which may be shorter or missing, as with ZeRO 3.

    Args:
        start: place of the chunk in the buffer of its rank, the same on all.
    """
    size = -(-numel // ranks)
    return tuple(Piece(rank, start, rank * size, min(size, numel - rank * size)) for rank in range(ranks) if rank * size < numel)


def one_buffer(numels: Sequence[int], ranks: int) -> list[tuple[Piece, ...]]:
    """Slices of parameters that lie one after the other in a buffer which is padded to parts of equal size: ZeRO 1 and 2."""
    size, pieces, first = -(-sum(numels) // (ALIGNMENT * ranks)) * ALIGNMENT, [], 0
    for numel in numels:
        pieces.append(cut_in_buffer(first, numel, size))
        first += numel
    return pieces


def own_chunks(numels: Sequence[int], ranks: int) -> list[tuple[Piece, ...]]:
    """Slices of parameters that are cut one by one, the chunks of a rank one after the other: ZeRO 3."""
    pieces, start = [], 0
    for numel in numels:
        pieces.append(cut_by_itself(numel, ranks, start))
        start += -(-numel // ranks)
    return pieces


LAYOUTS = {1: one_buffer, 2: one_buffer, 3: own_chunks}
"""By ZeRO stage: from the elements of a group's parameters, in order, and the number of ranks, to the slices of each."""
