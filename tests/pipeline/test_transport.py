"""Messages between two stages, without processes: they arrive as they were sent, and stay."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from ds_basisrot.pipeline.transport import Transport
from ds_basisrot.pipeline.wire import Control, Sort

CPU = torch.device("cpu")


class Line:
    """One direction: a receive completes when it is waited for, with the oldest message that was sent."""

    def __init__(self):
        self.sent = deque()

    def send(self, tensor):
        self.sent.append(tensor.clone())

    def receive(self, tensor):
        return tensor

    def wait(self, tensor):
        if tensor is not None:
            tensor.copy_(self.sent.popleft())


@pytest.fixture
def pair():
    """(first stage, second stage, line of the activations, line of the gradients), both of staleness 2."""
    activations, gradients = Line(), Line()
    ahead, back = (SimpleNamespace(data=line, control=None) for line in (activations, gradients))
    nothing = {"from_previous": None, "to_previous": None, "to_next": None, "from_next": None}
    first = Transport(SimpleNamespace(**nothing | {"to_next": ahead, "from_next": back}), 2, CPU, 2, 3)
    second = Transport(SimpleNamespace(**nothing | {"from_previous": ahead, "to_previous": back}), 2, CPU, 2, 3)
    return first, second, activations, gradients


def exchange(first, second, microbatch, output, scale=1.0):
    """An activation, and the gradient `scale * output` in return; what each side received."""
    if microbatch == 0:
        second.post_activation()
    first.send_activation(microbatch, Control(), torch.tensor([1.0, 2.0]), output)
    activation = second.receive_activation(microbatch)
    second.post_activation()
    activation[2].grad = scale * output
    second.send_gradient(microbatch, Control(stop_wanted=1), torch.tensor([5.0, 1.0, 2.0]), activation[2])
    first.post_gradient(microbatch)
    return activation, first.receive_gradient()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_messages_arrive_as_they_were_sent(pair, dtype):
    first, second, *_ = pair
    output = torch.arange(6, dtype=dtype).reshape(2, 3)
    (control, norms, inputs), (answer, fields, gradients) = exchange(first, second, 0, output, 3.0)
    assert control == Control(Sort.NORMAL) and norms.tolist() == [1.0, 2.0]
    assert torch.equal(inputs, output) and inputs.dtype == dtype and inputs.requires_grad and inputs.is_leaf
    assert answer.stop_wanted == 1 and fields.tolist() == [5.0, 1.0, 2.0]
    assert torch.equal(gradients[0], 3 * output) and gradients[0].dtype == dtype


def test_what_was_received_stays_and_what_was_sent_is_a_copy(pair):
    first, second, *_ = pair
    received = []
    for microbatch in range(20):
        output = torch.full((2, 3), float(microbatch))
        (_, _, inputs), (_, _, (gradient,)) = exchange(first, second, microbatch, output, -1.0)
        received.append((inputs, gradient))
        output.fill_(99.0)
    for microbatch, (inputs, gradient) in enumerate(received):
        assert torch.equal(inputs, torch.full((2, 3), float(microbatch))) and torch.equal(gradient, -inputs)


def test_a_received_gradient_may_become_that_of_a_parameter(pair):
    first, second, *_ = pair
    prefix, expected = torch.nn.Parameter(torch.zeros(2, 3)), torch.zeros(2, 3)
    for microbatch in range(6):  # as in a call of six, whose gradients add up in place
        *_, (gradient,) = exchange(first, second, microbatch, torch.full((1, 2, 3), float(microbatch)))[1]
        prefix.unsqueeze(0).backward(gradient)
        expected += microbatch
        assert torch.equal(prefix.grad, expected)


def test_changing_shapes_do_not_fill_memory(pair):
    first, second, *_ = pair
    for microbatch in range(40):
        output = torch.full((1 + microbatch % 20, 3), float(microbatch))
        (_, _, its), (_, _, (gradient,)) = exchange(first, second, microbatch, output)
        assert torch.equal(its, output) and torch.equal(gradient, output)
    assert len(first._activations_out._free) <= 5
