"""One weight that two stages share: both copies apply the same sum of both gradients, late by as long as the first stage's part travels."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .channels import Channel


@dataclass
class Pending:
    """The gradients of one update that were not applied yet.

    Attributes:
        update: whose they are.
        own: this stage's part.
        received: the other's part and its clip factor, with the receives to wait for; None: `total` is there.
        factor: this stage's clip factor, then the smaller of both.
        total: the sum of both parts, float32.
    """

    update: int
    own: Tensor | None = None
    received: tuple[Tensor, Tensor, list[Any]] | None = None
    factor: Tensor | None = None
    total: Tensor | None = None
    sends: list[Any] = field(default_factory=list)

    def settle(self, first: bool, to_other: Channel, from_other: Channel) -> None:
        """Wait for the other part and add both, the earlier stage's first, so that both stages get the same bits."""
        if self.received is None:
            return
        other, factor, works = self.received
        for work in works:
            from_other.wait(work)
        for work in self.sends:
            to_other.wait(work)
        parts = [self.own, other] if first else [other, self.own]
        self.total = parts[0].float() + parts[1].float()
        self.factor = torch.minimum(self.factor, factor.reshape(()))
        self.own, self.received, self.sends = None, None, []


class TiedWeight:
    """One weight of this stage that is tied to another stage's.

    Args:
        name: of the parameter on this stage.
        parameter: the weight.
        to_other, from_other: channels to and from the other stage.
    """

    def __init__(self, name: str, parameter: torch.nn.Parameter, to_other: Channel, from_other: Channel):
        self.name, self.parameter = name, parameter
        self.first, self.distance = to_other.me < to_other.stage, abs(to_other.me - to_other.stage)
        self._to, self._from = to_other, from_other
        self.pending: deque[Pending] = deque()
        self.applied = torch.zeros_like(parameter, dtype=torch.float32)

    def due(self, update: int, accumulation: int) -> Tensor:
        """The sum of the gradients that `update` applies; `applied` becomes it times the factors. float32."""
        delay = -(-self.distance // accumulation)
        total = torch.zeros_like(self.applied)
        self.applied = torch.zeros_like(self.applied)
        while self.pending and self.pending[0].update <= update - delay:
            each = self.pending.popleft()
            each.settle(self.first, self._to, self._from)
            total += each.total
            self.applied += each.total * each.factor
        return total

    def exchange(self, update: int, own: Tensor, factor: Tensor) -> None:
        """Send this stage's part of an update and post the receive of the other's. Returns at once."""
        own, factor = own.contiguous(), factor.detach().float().reshape(1).clone()
        other, its_factor = torch.empty_like(own), torch.empty_like(factor)
        works = [self._from.receive(t) for t in (other, its_factor)]
        sends = [self._to.send(t) for t in (own, factor)]
        # the tensors that are sent stay alive until the other part is here, and by then they have arrived
        self.pending.append(Pending(update, own, (other, its_factor, works), factor.reshape(()), None, sends))

    def settle(self) -> None:
        """Wait for all that is under way."""
        for each in self.pending:
            each.settle(self.first, self._to, self._from)
