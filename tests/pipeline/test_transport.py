"""Messages between two stages, without processes: what is kept, what is used again, and when."""

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
        self.sent, self.buffers = deque(), []

    def send(self, tensor):
        self.sent.append(tensor.clone())

    def receive(self, tensor):
        self.buffers.append(tensor.data_ptr())
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


def test_inputs_are_kept_and_buffers_of_gradients_used_again(pair):
    first, second, activations, gradients = pair
    inputs = []
    for microbatch in range(20):
        output = torch.full((2, 3), float(microbatch))
        (_, _, its), (_, _, (gradient,)) = exchange(first, second, microbatch, output, -1.0)
        inputs.append(its)
        assert torch.equal(gradient, -output)
    assert all(torch.equal(its, torch.full((2, 3), float(microbatch))) for microbatch, its in enumerate(inputs))
    assert len(set(activations.buffers)) == len(activations.buffers)
    assert len(set(gradients.buffers)) == 2


def test_a_gradient_is_good_until_the_next_one_is_waited_for(pair):
    first, second, *_ = pair
    _, (_, fields, (gradient,)) = exchange(first, second, 0, torch.ones(2, 3))
    first.send_activation(1, Control(), torch.zeros(2), torch.full((2, 3), 9.0))
    its = second.receive_activation(1)[2]
    its.grad = torch.full((2, 3), 9.0)
    second.send_gradient(1, Control(), torch.zeros(3), its)
    first.post_gradient(1)
    assert torch.equal(gradient, torch.ones(2, 3)) and fields.tolist() == [5.0, 1.0, 2.0]
    assert torch.equal(first.receive_gradient()[2][0], torch.full((2, 3), 9.0))


def test_changing_shapes_do_not_fill_memory(pair):
    first, second, *_ = pair
    for microbatch in range(40):
        output = torch.full((1 + microbatch % 20, 3), float(microbatch))
        (_, _, its), (_, _, (gradient,)) = exchange(first, second, microbatch, output)
        assert torch.equal(its, output) and torch.equal(gradient, output)
    assert len(first._gradients_in._buffers) <= 6 and len(first._activations_out._buffers) <= 6
