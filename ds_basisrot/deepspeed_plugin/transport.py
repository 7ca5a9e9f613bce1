"""Messages between neighbouring stages: receives posted ahead, sends that never block, a process group for each direction of each pair."""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
META_SIZE = 256

Payload = Tensor | tuple[Tensor, ...]


def as_tuple(payload: Payload) -> tuple[Tensor, ...]:
    """The tensors of a stage's input or output."""
    return payload if isinstance(payload, tuple) else (payload,)


def floating(payload: Payload) -> list[Tensor]:
    """The tensors that have gradients."""
    return [t for t in as_tuple(payload) if t.is_floating_point()]


class PairGroups:
    """The process groups of this rank: to and from its neighbours in the pipeline, forwards and backwards apart.

    Every rank of the job must build one, at the same time: creating process groups is collective.

    Args:
        pipelines: for every pipeline of the job, the global ranks of its stages in order.
    """

    def __init__(self, pipelines: list[list[int]]):
        me = dist.get_rank()
        self.previous = self.next = None
        self.from_previous = self.to_previous = self.to_next = self.from_next = None
        for ranks in pipelines:
            for first, second in zip(ranks, ranks[1:]):
                forwards, backwards = (dist.new_group([first, second]) for _ in range(2))
                if me == second:
                    self.previous, self.from_previous, self.to_previous = first, forwards, backwards
                elif me == first:
                    self.next, self.to_next, self.from_next = second, forwards, backwards


class Outbox:
    """Sends under way to one neighbour. Tensors are kept until their send is complete.

    Gloo cannot be asked whether a send is complete, only waited on; a send older than `depth` messages is known to be: the schedule has
    meanwhile received something that its receipt led to.
    """

    def __init__(self, peer: int, group: Any, depth: int):
        self._peer, self._group, self._depth = peer, group, depth
        self._under_way: deque[list[tuple[Any, Tensor]]] = deque()

    def send(self, tensors: list[Tensor]) -> None:
        """Send `tensors` as one message."""
        message = []
        for tensor in tensors:
            wire = (tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor).detach().contiguous()
            message.append((dist.isend(wire, self._peer, group=self._group), wire))
        self._under_way.append(message)
        while len(self._under_way) > self._depth:
            self._wait_for_oldest()

    def finish(self) -> None:
        """Wait until everything sent has been received."""
        while self._under_way:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work, _ in self._under_way.popleft():
            work.wait()


class Inbox:
    """Receives from one neighbour, posted ahead and waited for in order."""

    def __init__(self, peer: int, group: Any):
        self._peer, self._group = peer, group
        self._posted: deque[tuple[list[Any], list[Tensor]]] = deque()

    def post(self, tensors: list[Tensor]) -> None:
        """Post the receive of the next message into `tensors`."""
        self._posted.append(([dist.irecv(t, self._peer, group=self._group) for t in tensors], tensors))

    def take(self) -> list[Tensor]:
        """Wait for the oldest posted message."""
        works, tensors = self._posted.popleft()
        for work in works:
            work.wait()
        return tensors

    def __len__(self) -> int:
        return len(self._posted)


class Transport:
    """Activations and gradients of one stage.

    An activation message is the tensors of a stage's output; the first one is preceded by their dtypes and shapes, which then hold for all.
    A gradient message is a float32 vector of `fields` (the loss) and the gradients of the floating-point tensors.

    Args:
        groups: process groups to the neighbours.
        staleness: microbatches in flight on this stage, which bounds the sends under way.
        device: where received tensors are allocated.
        fields: length of the vector that travels with the gradients.
    """

    def __init__(self, groups: PairGroups, staleness: int, device: torch.device, fields: int):
        self._device, self._fields = device, fields
        self._activations_in = self._gradients_out = self._activations_out = self._gradients_in = None
        if groups.previous is not None:
            self._activations_in = Inbox(groups.previous, groups.from_previous)
            self._gradients_out = Outbox(groups.previous, groups.to_previous, staleness + 2)
        if groups.next is not None:
            self._activations_out = Outbox(groups.next, groups.to_next, staleness + 2)
            self._gradients_in = Inbox(groups.next, groups.from_next)
        self._layout_in: list[int] | None = None
        self._layout_out: list[int] | None = None

    def post_activation(self) -> None:
        """Post the receive of the next activation (of its layout, when that is not known yet)."""
        buffers = [torch.empty(META_SIZE, dtype=torch.int64, device=self._device)] if self._layout_in is None else self._buffers()
        self._activations_in.post(buffers)

    def receive_activation(self) -> Payload:
        """Wait for the next activation. Its floating-point tensors are leaves that collect gradients."""
        tensors = self._activations_in.take()
        if self._layout_in is None:
            self._layout_in = _trim(tensors[0].tolist())
            self._activations_in.post(self._buffers())
            tensors = self._activations_in.take()
        is_tuple, specs = _parse_layout(self._layout_in)
        received = tuple(t.bool() if dtype is torch.bool else t for t, (dtype, _) in zip(tensors, specs))
        for tensor in received:
            tensor.requires_grad_(tensor.is_floating_point())
        return received if is_tuple else received[0]

    def send_activation(self, output: Payload) -> None:
        """Send a stage's output to the next stage.

        Raises:
            RuntimeError: its shapes differ from those announced.
        """
        layout = _layout(output)
        if self._layout_out is None:
            meta = torch.zeros(META_SIZE, dtype=torch.int64)
            meta[: len(layout)] = torch.tensor(layout)
            self._activations_out.send([meta.to(self._device)])
            self._layout_out = layout
        elif layout != self._layout_out:
            was, now = (_parse_layout(each)[1] for each in (self._layout_out, layout))
            raise RuntimeError(
                f"the output of a stage changed from {was} to {now} between microbatches: async_1f1b needs one shape; drop the last short "
                "batch (drop_last=True), or pad"
            )
        self._activations_out.send(list(as_tuple(output)))

    def post_gradient(self) -> None:
        """Post the receive of the next gradient, whose shapes are those of the activations sent."""
        _, specs = _parse_layout(self._layout_out)
        gradients = [torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape in specs if dtype.is_floating_point]
        self._gradients_in.post([torch.empty(self._fields, dtype=torch.float32, device=self._device), *gradients])

    def receive_gradient(self) -> tuple[Tensor, list[Tensor]]:
        """Wait for the next gradient: (fields `[fields]`, gradients of the floating-point outputs)."""
        fields, *gradients = self._gradients_in.take()
        return fields, gradients

    def send_gradient(self, fields: Tensor, inputs: Payload) -> None:
        """Send the gradients that `inputs`, received before, have collected."""
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in floating(inputs)]
        self._gradients_out.send([fields, *gradients])

    def discard_posted(self) -> None:
        """Receive and drop the activations that were posted ahead, and wait for all sends: nothing is in flight afterwards."""
        while self._activations_in is not None and len(self._activations_in):
            self.receive_activation()
        for outbox in (self._activations_out, self._gradients_out):
            if outbox is not None:
                outbox.finish()

    def _buffers(self) -> list[Tensor]:
        _, specs = _parse_layout(self._layout_in)
        return [torch.empty(shape, dtype=torch.uint8 if dtype is torch.bool else dtype, device=self._device) for dtype, shape in specs]


def _layout(payload: Payload) -> list[int]:
    """[is tuple, tensors, (dtype, dimensions, sizes...) of each] as integers."""
    tensors = as_tuple(payload)
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RuntimeError(f"a stage must output a tensor or a tuple of real tensors, got {kind}")
    layout = [int(isinstance(payload, tuple)), len(tensors)]
    for tensor in tensors:
        layout += [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    if len(layout) > META_SIZE:
        raise RuntimeError(f"the output of a stage has too many tensors or dimensions to announce: {len(tensors)} tensors")
    return layout


def _parse_layout(layout: list[int]) -> tuple[bool, list[tuple[torch.dtype, tuple[int, ...]]]]:
    is_tuple, number, *rest = layout
    specs = []
    for _ in range(number):
        dtype, ndim, *rest = rest
        specs.append((DTYPES[dtype], tuple(rest[:ndim])))
        rest = rest[ndim:]
    return bool(is_tuple), specs


def _trim(meta: list[int]) -> list[int]:
    """The layout at the front of a padded announcement."""
    position = 2
    for _ in range(meta[1]):
        position += 2 + meta[position + 1]
    return meta[:position]
