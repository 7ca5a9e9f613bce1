"""Symmetric matrices stored once: panels of rows of the lower triangle, one after the other, and products that fill only those.

A symmetric `[..., k, k]` is packed as `[..., packed_size(k)]`. The panel of rows s to e holds columns 0 to e: the squares on the diagonal
are whole, and everything above them is left out. That saves almost half of the numbers and of the multiplications.
"""

from collections.abc import Iterator

from torch import Tensor

PANEL_ROWS = 128


def packed_size(side: int) -> int:
    """Numbers in a packed symmetric matrix of this side."""
    return sum((stop - start) * stop for start, stop in _panel_rows(side))


def add_gram(packed: Tensor, x: Tensor, decay: float | Tensor, weight: float) -> None:
    """packed <- decay * packed + weight * x x^T, for x `[..., k, j]`; `decay` may be a scalar tensor on the device."""
    if isinstance(decay, Tensor):
        packed.mul_(decay)
        decay = 1.0
    for (start, stop), panel in _panels(packed, x.shape[-2]):
        rows, columns = x[..., start:stop, :], x[..., :stop, :].mT
        if x.ndim == 2:
            panel.addmm_(rows, columns, beta=decay, alpha=weight)
        else:
            panel.flatten(0, -3).baddbmm_(rows.flatten(0, -3), columns.flatten(0, -3), beta=decay, alpha=weight)


def unpack(packed: Tensor, side: int) -> Tensor:
    """The whole matrix `[..., k, k]`, a copy."""
    whole = packed.new_empty(*packed.shape[:-1], side, side)
    for (start, stop), panel in _panels(packed, side):
        whole[..., start:stop, :stop] = panel
        whole[..., :start, start:stop] = panel[..., :start].mT
    return whole


def _panel_rows(side: int) -> list[tuple[int, int]]:
    return [(start, min(start + PANEL_ROWS, side)) for start in range(0, side, PANEL_ROWS)]


def _panels(packed: Tensor, side: int) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Each panel's rows and its view `[..., stop - start, stop]` of the packed numbers."""
    offset = 0
    for start, stop in _panel_rows(side):
        size = (stop - start) * stop
        yield (start, stop), packed[..., offset : offset + size].unflatten(-1, (stop - start, stop))
        offset += size
