"""How much memory an optimizer's state takes, counted from its tensors."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors in `optimizer.state`, at any depth; storage that several tensors share counts once, and whole."""
    storages = (tensor.untyped_storage() for tensor in _tensors(optimizer.state))
    return sum({(storage.device, storage.data_ptr()): storage.nbytes() for storage in storages}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
