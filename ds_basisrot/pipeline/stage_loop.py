"""One stage of the no-flush schedule: what is in flight, and what its actions do with messages; a framework adds what computes."""

from collections.abc import Callable

from torch import Tensor

from . import chrome_trace
from .actions import run
from .lagged_norms import LaggedNorms
from .schedule import Action, AsyncSchedule, Kind
from .stop_requests import StopRequests
from .transport import Transport
from .weight_versions import WeightVersions
from .wire import Control, Payload, Sort


class CallEnded(Exception):
    """Ends a call before its end, where all stages learn that nothing is in flight any more."""


class StageLoop:
    """The state of one stage between and within calls. A subclass makes `forward`, `backward` and, where it belongs to a call, `update`.

    Args:
        index, stages: this stage, and how many there are.
        transport, versions, norms, stop: of this stage.

    Attributes:
        trace: where actions are shown; None: nowhere.
        inputs, outputs: of microbatches in flight. Inputs are kept until their gradients are sent.
        gradients: of the outputs of the microbatch whose backward is next.
        holes: microbatches in flight that there are no data for.
    """

    def __init__(self, index: int, stages: int, transport: Transport, versions: WeightVersions, norms: LaggedNorms, stop: StopRequests):
        self.index, self.stages, self.transport, self.versions = index, stages, transport, versions
        self.norms, self.stop = norms, stop
        self.trace: chrome_trace.Writer | None = None
        self.inputs: dict[int, Payload] = {}
        self.outputs: dict[int, Payload] = {}
        self.gradients: list[Tensor] = []
        self.holes: set[int] = set()
        self._exchanging = False
        self._calls: dict[tuple[int, bool], list[tuple[Action, Callable[[int], None]]]] = {}
        self._handlers: dict[Kind, Callable[[int], None]] = {
            Kind.POST_ACTIVATION: lambda _: transport.post_activation(),
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self.forward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.POST_GRAD: transport.post_gradient,
            Kind.RECV_GRAD: self._receive_gradient,
            Kind.BACKWARD: self.backward,
            Kind.SEND_GRAD: self._send_gradient,
            Kind.UPDATE: lambda _: self.update(),
        }

    @property
    def is_first(self) -> bool:
        """Whether it reads inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes losses."""
        return self.index == self.stages - 1

    def call(self, first: int, accumulation: int, filled: bool, updates: Callable[[], int]) -> None:
        """The actions of one call.

        Args:
            first: first microbatch that it trains.
            accumulation: how many it trains.
            filled: whether the pipeline is.
            updates: how many this stage has made by now.
        """
        self.exchange(lambda: self._run(self._actions(accumulation, filled), first, updates))

    def _run(self, actions: list[tuple[Action, Callable[[int], None]]], first: int, updates: Callable[[], int]) -> None:
        run(actions, first, self.trace, updates)
        self.transport.finish_gradients()

    def exchange(self, action: Callable[[], None]) -> None:
        """Do what exchanges messages with other stages. Where it fails, nobody knows what is in flight, and nothing follows."""
        self.check_whole()
        self._exchanging = True
        try:
            action()
        except CallEnded:
            self._exchanging = False
            raise
        self._exchanging = False

    def check_whole(self) -> None:
        """Refuse to go on after an exchange that has failed: other stages wait for what it did not send, and this one would for ever.

        Raises:
            RuntimeError: one has.
        """
        if self._exchanging:
            raise RuntimeError(
                f"stage {self.index} failed in the middle of an earlier call (see what it raised), and what it had in flight is lost: "
                "end the job and resume from a checkpoint"
            )

    def _actions(self, accumulation: int, filled: bool) -> list[tuple[Action, Callable[[int], None]]]:
        """Of a call whose first microbatch is 0, and what they do. All calls but those after a cut are alike."""
        if (accumulation, filled) not in self._calls:
            actions = AsyncSchedule(self.stages, accumulation).call(self.index, 0, filled)
            self._calls = {(accumulation, filled): [(action, self._handlers[action.kind]) for action in actions]}
        return self._calls[accumulation, filled]

    def drop(self) -> None:
        """Between two calls, on all stages: drop what is in flight."""
        self.check_whole()
        self.transport.drop_activations()
        self.forget()

    def forget(self) -> None:
        """Nothing is in flight any more."""
        self.transport.forget()
        self.versions.drop()
        self.inputs.clear()
        self.outputs.clear()
        self.holes.clear()

    # -- of the framework --------------------------------------------------------------------------------------------------------------

    def forward(self, microbatch: int) -> None:
        """From `inputs` to `outputs`; on the first stage it finds the inputs, or adds to `holes`."""
        raise NotImplementedError

    def backward(self, microbatch: int) -> None:
        """From `outputs`, which it takes away, and `gradients` to those of `inputs`."""
        raise NotImplementedError

    def update(self) -> None:
        """The optimizer's step, where it belongs to a call."""

    def control(self, sort: Sort = Sort.NORMAL) -> Control:
        """At the head of a message."""
        return Control(sort, self.stop.after, int(self.stop.wanted))

    def gradient_fields(self, microbatch: int) -> Tensor:
        """What travels with a gradient: a loss, then the norms."""
        return self.norms.fields

    def activation_received(self, control: Control) -> None:
        """More to learn from a control, before the activation is taken."""

    def activation_sent(self, microbatch: int) -> None:
        """What is to do after sending."""

    def gradient_received(self, microbatch: int, control: Control, fields: Tensor) -> None:
        """More to learn from what came with a gradient."""

    # -- messages ----------------------------------------------------------------------------------------------------------------------

    def _receive_activation(self, microbatch: int) -> None:
        control, norms, inputs = self.transport.receive_activation(microbatch)
        self.norms.from_previous(norms)
        self.stop.heard(0, control.stop_after)
        self.activation_received(control)
        if control.sort is Sort.NORMAL:
            self.inputs[microbatch] = inputs
        else:
            self.holes.add(microbatch)

    def _send_activation(self, microbatch: int) -> None:
        if microbatch in self.holes:
            self.transport.send_activation(microbatch, self.control(Sort.HOLE), self.norms.known, None)
        else:
            self.transport.send_activation(microbatch, self.control(), self.norms.known, self.outputs[microbatch])
        self.activation_sent(microbatch)

    def _receive_gradient(self, microbatch: int) -> None:
        control, fields, self.gradients = self.transport.receive_gradient()
        self.norms.from_next(fields[1:])
        self.stop.heard(control.stop_wanted, -1)
        self.gradient_received(microbatch, control, fields)

    def _send_gradient(self, microbatch: int) -> None:
        self.transport.send_gradient(microbatch, self.control(), self.gradient_fields(microbatch), self.inputs.pop(microbatch))
