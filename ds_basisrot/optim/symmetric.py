"""Symmetric matrices stored once: the blocks of the lower triangle, one after the other, and products that fill only those.

A symmetric `[..., k, k]` is packed as `[..., packed_size(k)]`: strips of rows, each with one wide block left of the diagonal, where
products are most efficient, and the square on the diagonal in narrower panels. That saves almost half of the numbers and of the products.
"""

from collections.abc import Iterator

from torch import Tensor

STRIP_ROWS, PANEL_ROWS = 384, 128


def packed_size(side: int) -> int:
    """Numbers in a packed symmetric matrix of this side."""
    return sum((stop - start) * (end - first) for start, stop, first, end in _block_bounds(side))


def add_gram(packed: Tensor, x: Tensor, decay: float | Tensor, weight: float) -> None:
    """packed <- decay * packed + weight * x x^T, for x `[..., k, j]`; `decay` may be a scalar tensor on the device."""
    if isinstance(decay, Tensor):
        packed.mul_(decay)
        decay = 1.0
    side = x.shape[-2]
    if side <= PANEL_ROWS:
        _add_product(packed.view(*packed.shape[:-1], side, side), x, x.mT, decay, weight)
        return
    for (start, stop, first, end), block in _blocks(packed, side):
        _add_product(block, x[..., start:stop, :], x[..., first:end, :].mT, decay, weight)


def _add_product(block: Tensor, rows: Tensor, columns: Tensor, decay: float, weight: float) -> None:
    if block.ndim == 2:
        block.addmm_(rows, columns, beta=decay, alpha=weight)
    else:
        block.flatten(0, -3).baddbmm_(rows.flatten(0, -3), columns.flatten(0, -3), beta=decay, alpha=weight)


def unpack(packed: Tensor, side: int) -> Tensor:
    """The whole matrix `[..., k, k]`, a copy."""
    whole = packed.new_empty(*packed.shape[:-1], side, side)
    for (start, stop, first, end), block in _blocks(packed, side):
        whole[..., start:stop, first:end] = block
        whole[..., first:start, start:stop] = block[..., : start - first].mT
    return whole


def _block_bounds(side: int) -> list[tuple[int, int, int, int]]:
    """(first row, row after the last, first column, column after the last) of every block."""
    if side <= PANEL_ROWS:
        return [(0, side, 0, side)]
    bounds = []
    for top in range(0, side, STRIP_ROWS):
        bottom = min(top + STRIP_ROWS, side)
        bounds += [(top, bottom, 0, top)] if top else []
        bounds += [
            (start, min(start + PANEL_ROWS, bottom), top, min(start + PANEL_ROWS, bottom)) for start in range(top, bottom, PANEL_ROWS)
        ]
    return bounds


def _blocks(packed: Tensor, side: int) -> Iterator[tuple[tuple[int, int, int, int], Tensor]]:
    """Each block's bounds and its view `[..., rows, columns]` of the packed numbers."""
    offset = 0
    for start, stop, first, end in _block_bounds(side):
        size = (stop - start) * (end - first)
        yield (start, stop, first, end), packed[..., offset : offset + size].unflatten(-1, (stop - start, end - first))
        offset += size
