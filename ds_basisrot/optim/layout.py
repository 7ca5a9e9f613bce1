"""A parameter as the matrices that are rotated: blocks of rows in a fused weight, transposed weights, stacks, convolutions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from .options import KINDS, check_layout

# Number of dimensions -> what a parameter is taken for, unless its layout says otherwise.
DEFAULT_KINDS = {2: "matrix", 3: "stack", 4: "convolution", 5: "convolution"}


@dataclass(frozen=True)
class Part:
    """One stack of equally shaped matrices inside a parameter, and where it lies."""

    name: str
    """Empty where the parameter is one part, else e.g. "q", "k", "v", or "0", "1", ..."""
    shape: tuple[int, int, int]
    """[b, m, n]: b matrices."""
    parameter_shape: tuple[int, ...]
    kind: str
    transposed: bool = False
    groups: int = 1
    first_row: int = 0
    """Of this part's rows, within each group."""

    @cached_property
    def is_whole(self) -> bool:
        """True when `take(tensor)` is `tensor.reshape(1, m, n)`: the part is one matrix, and all of the parameter."""
        in_order = not self.transposed and self.kind != "columns"
        return self.shape[0] == 1 and in_order and math.prod(self.shape) == math.prod(self.parameter_shape)

    def take(self, tensor: Tensor) -> Tensor:
        """The matrices `[b, m, n]` in a tensor of the parameter's shape.

        A view where the memory allows it: always for one group of rows of a matrix or stack, and for a convolution in the default memory
        format; else a copy.
        """
        return self._place(tensor).reshape(self.shape)

    def put(self, matrices: Tensor, tensor: Tensor) -> None:
        """Write the matrices `[b, m, n]` to their place in `tensor`, of the parameter's shape and any strides; the rest stays as it is."""
        place = self._place(tensor)
        place.copy_(matrices.reshape(place.shape))

    def _place(self, tensor: Tensor) -> Tensor:
        """This part as a view `[b, groups, rows, ...]` of a tensor of the parameter's shape."""
        if self.transposed:
            tensor = tensor.mT
        if self.kind == "columns":
            tensor = tensor.transpose(0, 1)
        if self.kind != "stack":
            tensor = tensor.unsqueeze(0)
        groups = tensor.unflatten(1, (self.groups, tensor.shape[1] // self.groups))
        return groups.narrow(2, self.first_row, self.shape[1] // self.groups)


def parts(shape: Sequence[int], entry: bool | Mapping[str, Any]) -> tuple[Part, ...]:
    """The matrices that are rotated in a parameter of this shape.

    Args:
        shape: of the parameter.
        entry: what stands in a parameter group's `rotate` for it. False: nothing is rotated. True: what the number of dimensions says, as
            for an empty layout. A layout is plain data:

            * "rows": sizes of the blocks of rows in one group, such as [d, d, d] for Q, K and V stacked one after the other.
            * "groups": how often the blocks repeat (default 1), such as the number of heads where Q, K and V are interleaved by head. A
              part collects its block of every group: `[groups * rows, n]`.
            * "names": of the parts (default "0", "1", ...).
            * "transposed": the parameter holds the transpose of the matrix that is meant, and whose rows are meant (default false).
            * "kind": "matrix" `[m, n]`, "stack" `[b, m, n]`, "columns" `[b, m, n]`, which is one matrix `[m, b * n]` whose b blocks of
              columns lie one after the other, or "convolution" `[out, in, k...]`, rotated as `[out, in * k...]` (default: matrix, stack
              and convolution for 2, 3, and 4 or 5 dimensions).

    Returns:
        The parts, in the order of their rows, which together are the whole parameter.

    Raises:
        ValueError: an illegal layout, or one that does not fit the shape.
    """
    if entry is False:
        return ()
    if entry is not True and not isinstance(entry, Mapping):
        raise ValueError(f"must be true, false or a layout, got {entry!r}")
    layout, shape = {} if entry is True else entry, tuple(shape)
    check_layout(layout, "layout")
    kind = layout.get("kind", DEFAULT_KINDS.get(len(shape)))
    if kind is None:
        raise ValueError(f"shape {list(shape)} cannot be rotated: only matrices [m, n], stacks [b, m, n], convolutions [out, in, k...] can")
    if len(shape) not in KINDS[kind]:
        dimensions = " or ".join(map(str, KINDS[kind]))
        raise ValueError(f"shape {list(shape)} cannot be rotated as a {kind}, which has {dimensions} dimensions")
    transposed = layout.get("transposed", False)
    if transposed and kind in ("convolution", "columns"):
        raise ValueError(f"layout: transposed is for a matrix or a stack, not for {'a ' * (kind != 'columns')}{kind}")

    if kind == "columns":
        stacked, m, *rest = 1, shape[1], shape[0], shape[2]
    else:
        stacked, m, *rest = shape if kind == "stack" else (1, *shape)
    n = math.prod(rest)
    if transposed:
        m, n = n, m
    rows, groups = layout.get("rows", [m]), layout.get("groups", 1)
    if groups * sum(rows) != m:
        made = f"{groups} x {sum(rows)}" if groups > 1 else f"{sum(rows)}"
        raise ValueError(f"layout: rows {list(rows)} make {made} rows, but shape {list(shape)} has {m}" + " when transposed" * transposed)
    names = layout.get("names") or ([""] if len(rows) == 1 else [str(index) for index in range(len(rows))])
    return tuple(
        Part(name, (stacked, groups * block, n), shape, kind, transposed, groups, sum(rows[:index]))
        for index, (name, block) in enumerate(zip(names, rows))
    )
