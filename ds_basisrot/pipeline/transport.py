"""Messages between neighbouring stages: receives posted ahead, sends that never block, a channel for each direction of each pair."""

from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from .channels import Channel, Lane, Lanes
from .wire import (
    CONTROL_NUMBERS,
    Control,
    Format,
    Layout,
    Payload,
    Sort,
    activation_format,
    as_tuple,
    control_tensor,
    floating,
    gradient_format,
    layout_of,
    pack,
    parse,
)

MAX_LAYOUT = 256
MOST_FORMATS = 4  # whose buffers are kept to be used again
ANNOUNCEMENT = Format(0, ((torch.int64, (MAX_LAYOUT,)),))
"""A message whose tensor is a layout."""


class Outbox:
    """Sends under way to one neighbour. Buffers are kept until their send is complete, then used again.

    Gloo cannot be asked whether a send is complete, only waited on; a send older than `depth` messages is known to be: the schedule has
    meanwhile received something that its receipt led to.
    """

    def __init__(self, lane: Lane, depth: int, device: torch.device):
        self._lane, self._depth, self._device = lane, depth, device
        self._under_way: deque[list[tuple[Channel, Any, Format | None, Any]]] = deque()
        self._free: dict[Format, list[tuple[Tensor, list[Tensor]]]] = defaultdict(list)

    def send(self, *messages: tuple[Format, Control, Tensor | None, list[Tensor]]) -> None:
        """Send messages of (format, control, fields, tensors), one after the other."""
        data, apart = self._lane.data, self._lane.control
        parts = []
        for form, control, fields, tensors in messages:
            buffer, views = self._free[form].pop() if self._free[form] else form.new(self._device)
            pack(views, control if apart is None else None, fields, tensors)
            parts.append((data, data.send(buffer), form, (buffer, views)))
            if apart is not None:
                numbers = control_tensor(control.numbers())
                parts.append((apart, apart.send(numbers), None, numbers))
        self._under_way.append(parts)
        while len(self._under_way) > self._depth:
            self._wait_for_oldest()
        if len(self._free) > MOST_FORMATS:  # of shapes that may not come again
            self._free.clear()

    def finish(self) -> None:
        """Wait until everything sent has been received."""
        while self._under_way:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for channel, work, form, buffer in self._under_way.popleft():
            channel.wait(work)
            if form is not None:
                self._free[form].append(buffer)


class Inbox:
    """Receives from one neighbour, posted ahead and waited for in order.

    Each message has memory of its own: inputs live until their backward, and autograd may make a received gradient that of a parameter.
    """

    def __init__(self, lane: Lane, device: torch.device):
        self._lane, self._device = lane, device
        self._posted: deque[tuple[list[Tensor], Any, Tensor | None, Any]] = deque()

    def post(self, form: Format) -> None:
        """Post the receive of the next message."""
        buffer, views = form.new(self._device)
        work, control, control_work = self._lane.data.receive(buffer), None, None
        if self._lane.control is not None:
            control = torch.empty(CONTROL_NUMBERS, dtype=torch.int64)
            control_work = self._lane.control.receive(control)
        self._posted.append((views, work, control, control_work))

    def take(self) -> tuple[Control, Tensor, list[Tensor]]:
        """Wait for the oldest posted message: (control, fields, tensors)."""
        (numbers, fields, *tensors), work, control, control_work = self._posted.popleft()
        if control_work is not None:
            self._lane.control.wait(control_work)
        self._lane.data.wait(work)
        return Control.of((numbers if control is None else control).tolist()), fields, tensors

    def __len__(self) -> int:
        return len(self._posted)


class Transport:
    """Activations and gradients of one stage.

    An activation message carries a stage's output in the layout of the one before; where that changes, a message says so, a second one
    announces the new layout, and the third is the activation. A gradient message carries the gradients of the floating-point tensors of
    the activation of the same microbatch. Both begin with control numbers and `fields` float32 numbers.

    Args:
        lanes: to and from the neighbours.
        staleness: microbatches in flight on this stage, which bounds the sends under way.
        device: where received tensors are allocated.
        activation_fields, gradient_fields: float32 numbers in each kind of message.
    """

    def __init__(self, lanes: Lanes, staleness: int, device: torch.device, activation_fields: int, gradient_fields: int):
        depth = staleness + 2
        self._activation_fields, self._gradient_fields = activation_fields, gradient_fields
        self._activations_in = Inbox(lanes.from_previous, device) if lanes.from_previous else None
        self._gradients_out = Outbox(lanes.to_previous, depth, device) if lanes.to_previous else None
        self._activations_out = Outbox(lanes.to_next, depth, device) if lanes.to_next else None
        self._gradients_in = Inbox(lanes.from_next, device) if lanes.from_next else None
        self._layout_in: Layout | None = None
        self._layout_out: Layout | None = None
        self._received: dict[int, Layout | None] = {}  # of the activations whose gradients are to come
        self._sent: dict[int, Layout | None] = {}

    def post_activation(self) -> None:
        """Post the receive of the next activation."""
        self._activations_in.post(activation_format(self._layout_in, self._activation_fields))

    def receive_activation(self, microbatch: int) -> tuple[Control, Tensor, Payload | None]:
        """Wait for the next activation: (control, fields, tensors). Floating-point tensors are leaves that collect gradients.

        There are no tensors in a message that is not NORMAL.
        """
        control, fields, tensors = self._activations_in.take()
        if control.sort is Sort.CHANGED:
            self._activations_in.post(ANNOUNCEMENT)
            self._layout_in = _trim(self._activations_in.take()[2][0].tolist())
            self.post_activation()
            control, fields, tensors = self._activations_in.take()
        self._received[microbatch] = self._layout_in
        if control.sort is not Sort.NORMAL:
            return control, fields, None
        for tensor in tensors:
            tensor.requires_grad_(tensor.is_floating_point())
        return control, fields, tuple(tensors) if parse(self._layout_in)[0] else tensors[0]

    def send_activation(self, microbatch: int, control: Control, fields: Tensor, output: Payload | None) -> None:
        """Send a stage's output, None in a message that is not NORMAL, to the next stage."""
        layout = self._layout_out if output is None else layout_of(output)
        messages = []
        if layout != self._layout_out:
            if len(layout) > MAX_LAYOUT:
                raise RuntimeError(f"the output of a stage has too many tensors or dimensions to announce: {layout[1]} tensors")
            announced = torch.tensor([*layout, *[0] * (MAX_LAYOUT - len(layout))])
            changed = activation_format(self._layout_out, self._activation_fields)
            messages = [(changed, Control(Sort.CHANGED), None, []), (ANNOUNCEMENT, Control(), None, [announced])]
            self._layout_out = layout
        form = activation_format(layout, self._activation_fields)
        self._activations_out.send(*messages, (form, control, fields, [] if output is None else list(as_tuple(output))))
        self._sent[microbatch] = layout

    def post_gradient(self, microbatch: int) -> None:
        """Post the receive of the gradient of a microbatch whose activation was sent."""
        self._gradients_in.post(self._gradient_format(self._sent.pop(microbatch)))

    def receive_gradient(self) -> tuple[Control, Tensor, list[Tensor]]:
        """Wait for the next gradient: (control, fields, gradients of the floating-point outputs)."""
        return self._gradients_in.take()

    def send_gradient(self, microbatch: int, control: Control, fields: Tensor, inputs: Payload | None) -> None:
        """Send the gradients that `inputs`, received before, have collected; None in a message that is not NORMAL."""
        gradients = []
        if inputs is not None:
            gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in floating(inputs)]
        self._gradients_out.send((self._gradient_format(self._received.pop(microbatch)), control, fields, gradients))

    def drop_activations(self) -> None:
        """Receive and drop the activations that were posted."""
        while self._activations_in is not None and len(self._activations_in):
            self.receive_activation(-1)

    def forget(self) -> None:
        """Nothing is in flight any more: no gradient will come for the activations so far."""
        self._received.clear()
        self._sent.clear()

    def finish_gradients(self) -> None:
        """Wait until the gradients sent have been received: at the end of a call, so that the process may end or do something else.

        It costs nothing: what a stage forwards next comes from the stage before, which has posted the receive of its gradient by then.
        The activations sent have been received, or are announced in a new layout and waited for in the next call, if there is one.
        """
        if self._gradients_out is not None:
            self._gradients_out.finish()

    def finish_activations(self) -> None:
        """Wait until the activations sent have been received."""
        if self._activations_out is not None:
            self._activations_out.finish()

    def _gradient_format(self, layout: Layout | None) -> Format:
        return Format(self._gradient_fields, ()) if layout is None else gradient_format(layout, self._gradient_fields)


def _trim(announced: list[int]) -> Layout:
    """The layout at the front of a padded announcement."""
    position = 2
    for _ in range(announced[1]):
        position += 2 + announced[position + 1]
    return tuple(announced[:position])
