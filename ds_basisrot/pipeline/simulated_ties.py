"""Tied weights in the simulator: which gradients of the two copies are applied when, from a list of those on their way."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Tie:
    """Two parameters of equal values on two stages, the earlier stage first.

    Attributes:
        stages: of the two copies.
        copies: the two parameters.
        pending: by update, in ascending order: the sum of both copies' gradients, float32, which neither copy has applied yet.
        applied: the same of what the present update applies.
    """

    stages: tuple[int, int]
    copies: tuple[nn.Parameter, nn.Parameter]
    pending: dict[int, Tensor] = field(default_factory=dict)
    applied: dict[int, Tensor] = field(default_factory=dict)

    def delay(self, accumulation: int) -> int:
        """D = ceil((j - i) / accumulation): updates until a gradient of one copy has reached the other."""
        return -((self.stages[0] - self.stages[1]) // accumulation)


def find_ties(modules: Sequence[nn.Module], tied: Sequence[tuple[tuple[int, str], tuple[int, str]]]) -> list[Tie]:
    """The pairs that ((stage, name of a parameter in it), (stage, name)) stand for.

    Raises:
        ValueError: a stage or parameter that does not exist, copies that are not two, not in order, or not equal.
    """
    ties: list[Tie] = []
    for pair in tied:
        copies = []
        for stage, name in pair:
            parameter = dict(modules[stage].named_parameters()).get(name) if 0 <= stage < len(modules) else None
            if parameter is None or not parameter.requires_grad:
                raise ValueError(f"tied: stage {stage} has no trainable parameter {name!r}")
            copies.append(parameter)
        if pair[0][0] >= pair[1][0]:
            raise ValueError(f"tied: give the earlier stage first and two different stages, got {pair}")
        if copies[0] is copies[1]:
            raise ValueError(f"tied: each stage needs a copy of its own, but {pair} are one parameter")
        if not torch.equal(*copies):
            raise ValueError(f"tied: the two copies must be equal, those of {pair} are not")
        if any(copy is other for copy in copies for tie in ties for other in tie.copies):
            raise ValueError(f"tied: a parameter may be in one pair, that of {pair} is in two")
        ties.append(Tie((pair[0][0], pair[1][0]), (copies[0], copies[1])))
    return ties


def exchange(tie: Tie, holders: Sequence[nn.Parameter], update: int, accumulation: int) -> None:
    """Take the two gradients of this update, and put S, the sum of those that are due now, in the place of the earlier stage's.

    The later stage's becomes None: norms count S once.

    Args:
        holders: the two parameters whose `grad` will be applied: the copies, or what an optimizer has in their place.
    """
    own = [torch.zeros_like(q) if q.grad is None else q.grad for q in holders]
    tie.pending[update] = own[0].float() + own[1].float()
    tie.applied = {v: tie.pending.pop(v) for v in sorted(tie.pending) if v <= update - tie.delay(accumulation)}
    total = sum(tie.applied.values(), start=torch.zeros_like(tie.copies[0], dtype=torch.float32))
    holders[0].grad, holders[1].grad = total.to(holders[0].dtype), None


def apply(tie: Tie, holders: Sequence[nn.Parameter], factors: Sequence[Sequence[Tensor]]) -> None:
    """Give both copies T: the due sums, each times the smaller clip factor of the two stages in the update that it comes from.

    Args:
        holders: as in `exchange`.
        factors: `[stage][update]`.
    """
    first, last = (factors[stage] for stage in tie.stages)
    parts = [both * torch.minimum(first[v], last[v]) for v, both in tie.applied.items()]
    total = sum(parts, start=torch.zeros_like(tie.copies[0], dtype=torch.float32))
    for q in holders:
        q.grad = total.to(q.dtype, copy=True)
