"""The data of one stage: what a forward has read is kept until its microbatch is trained, and given again where it is forwarded anew."""

from collections.abc import Iterator
from typing import Any


class Feed:
    """Stands in for a script's data iterator.

    Args:
        source: the script's iterator; None on ranks that read no data.
    """

    def __init__(self, source: Iterator[Any] | None):
        self.source = source
        self._kept: dict[int, list[Any]] = {}
        self._microbatch, self._position = -1, 0

    def begin(self, microbatch: int) -> None:
        """What is read from now on belongs to this microbatch."""
        self._microbatch, self._position = microbatch, 0

    def has_next(self) -> bool:
        """Whether there is something to read for the microbatch that was begun; True on ranks that read no data."""
        items = self._kept.setdefault(self._microbatch, [])
        if hasattr(self.source, "__next__") and self._position == len(items):
            try:
                items.append(next(self.source))
            except StopIteration:
                return False
        return True

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> Any:
        items = self._kept.setdefault(self._microbatch, [])
        if self._position == len(items):
            items.append(next(self.source))
        self._position += 1
        return items[self._position - 1]

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not there yet, while it is being copied
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def reads_ahead(self) -> bool:
        """Whether it holds data that no update has seen."""
        return any(self._kept.values())

    def trained(self, end: int) -> None:
        """Forget the microbatches before `end`."""
        for microbatch in [m for m in self._kept if m < end]:
            del self._kept[microbatch]
