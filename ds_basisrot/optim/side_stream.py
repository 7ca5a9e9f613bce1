"""A second stream of an accelerator, on which refreshes run beside the other matrices' updates; nothing on a processor."""

from typing import Any

import torch


class SideStream:
    """`with side: ...` puts work on the second stream, after all that the current one holds; `join()` makes the current one wait for it.

    What runs between the two must not touch the same tensors.
    """

    _streams: dict[torch.device, Any] = {}  # one for each device, made once

    def __init__(self, device: torch.device):
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)

    def __enter__(self) -> None:
        if self._module is not None:
            if self._device not in self._streams:
                self._streams[self._device] = self._module.Stream(device=self._device)
            self._side, self._main = self._streams[self._device], self._module.current_stream(self._device)
            self._side.wait_stream(self._main)
            self._context = self._module.stream(self._side)
            self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._module is not None:
            self._context.__exit__(*error)

    def join(self) -> None:
        """From here on the current stream waits for the work on the second one."""
        if self._module is not None:
            self._main.wait_stream(self._side)
