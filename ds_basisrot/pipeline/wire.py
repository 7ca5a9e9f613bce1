"""What one message between stages looks like: control numbers, float32 fields and tensors, packed into one buffer of bytes."""

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
ALIGNMENT = 16

Payload = Tensor | tuple[Tensor, ...]
Layout = tuple[int, ...]
"""(is tuple, tensors, (dtype, dimensions, sizes...) of each) of a stage's output, as integers."""


class Sort(IntEnum):
    """What a message is, its first control number."""

    NORMAL = 0
    HOLE = 1  # there is no such microbatch: the data has ended
    STOP = 2  # instead of the first microbatch: there is not enough data for one update
    ABANDON = 3  # what is in flight is dropped, the pipeline fills anew within this call
    CHANGED = 4  # the tensors' layout changes: the new one follows, then the message itself


@dataclass
class Control:
    """The numbers at the head of a message.

    Attributes:
        sort: what the message is.
        stop_after: from the first stage: the update after which all stages stop; -1: none.
        stop_wanted: to the first stage: 1 if a process has been asked to stop.
        used_restored: from the first stage: 1 if what a checkpoint had read ahead comes before the iterator.
    """

    sort: Sort = Sort.NORMAL
    stop_after: int = -1
    stop_wanted: int = 0
    used_restored: int = 0

    def numbers(self) -> tuple[int, ...]:
        return (int(self.sort), self.stop_after, self.stop_wanted, self.used_restored)

    @staticmethod
    def of(numbers: list[int]) -> "Control":
        return Control(Sort(numbers[0]), *numbers[1:])


CONTROL_NUMBERS = len(Control().numbers())


def as_tuple(payload: Payload) -> tuple[Tensor, ...]:
    """The tensors of a stage's input or output."""
    return payload if isinstance(payload, tuple) else (payload,)


def floating(payload: Payload) -> list[Tensor]:
    """The tensors that have gradients."""
    return [t for t in as_tuple(payload) if t.is_floating_point()]


def layout_of(payload: Payload) -> Layout:
    """The layout of a stage's output.

    Raises:
        RuntimeError: it is no tensor or tuple of tensors of real numbers.
    """
    tensors = as_tuple(payload)
    layout = [int(isinstance(payload, tuple)), len(tensors)]
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RuntimeError(f"a stage must output a tensor or a tuple of real tensors, got {kind}")
        layout += [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    return tuple(layout)


@lru_cache(maxsize=256)
def parse(layout: Layout) -> tuple[bool, tuple[tuple[torch.dtype, tuple[int, ...]], ...]]:
    """(is tuple, (dtype, shape) of each tensor)."""
    is_tuple, number, *rest = layout
    specs = []
    for _ in range(number):
        dtype, ndim, *rest = rest
        specs.append((DTYPES[dtype], tuple(rest[:ndim])))
        rest = rest[ndim:]
    return bool(is_tuple), tuple(specs)


class Format:
    """Where everything lies in the buffer of a message.

    Args:
        fields: float32 numbers before the tensors.
        specs: dtype and shape of each tensor.
    """

    def __init__(self, fields: int, specs: tuple[tuple[torch.dtype, tuple[int, ...]], ...]):
        self._places: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]] = []
        position = 0
        for dtype, shape in ((torch.int64, (CONTROL_NUMBERS,)), (torch.float32, (fields,)), *specs):
            strides = tuple(torch.Size(shape[place + 1 :]).numel() for place in range(len(shape)))
            self._places.append((dtype, shape, strides, position // dtype.itemsize))
            position += -(-dtype.itemsize * torch.Size(shape).numel() // ALIGNMENT) * ALIGNMENT
        self._dtypes = {dtype for dtype, *_ in self._places} - {torch.int64}
        self.bytes = position

    def new(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """A buffer, and (control, fields, tensors...) in it."""
        buffer = torch.empty(self.bytes // torch.int64.itemsize, dtype=torch.int64, device=device)
        typed = {torch.int64: buffer, **{dtype: buffer.view(dtype) for dtype in self._dtypes}}
        return buffer, [torch.as_strided(typed[dtype], shape, strides, offset) for dtype, shape, strides, offset in self._places]


def pack(views: list[Tensor], control: Control | None, fields: Tensor | None, tensors: list[Tensor]) -> None:
    """Write a message into the views of its buffer. Places of what is not given stay as they are."""
    if control is not None:
        views[0].copy_(control_tensor(control.numbers()))
    if fields is not None:
        views[1].copy_(fields)
    for place, tensor in zip(views[2:], tensors):
        place.copy_(tensor.detach())


@lru_cache(maxsize=64)
def control_tensor(numbers: tuple[int, ...]) -> Tensor:
    """Control numbers as they are sent; not to be written to."""
    return torch.tensor(numbers, dtype=torch.int64)


@lru_cache(maxsize=256)
def activation_format(layout: Layout | None, fields: int) -> Format:
    """Of a message that carries a stage's output; None: of one that cannot carry any yet."""
    return Format(fields, parse(layout)[1] if layout is not None else ())


@lru_cache(maxsize=256)
def gradient_format(layout: Layout, fields: int) -> Format:
    """Of a message that carries the gradients of the floating-point tensors of that output."""
    return Format(fields, tuple((dtype, shape) for dtype, shape in parse(layout)[1] if dtype.is_floating_point))
