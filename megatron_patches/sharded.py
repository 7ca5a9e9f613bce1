"""BasisRotation inside Megatron's optimizers: their parameters go into flat buffers, are updated by their owners, and come back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_basisrot.optim.state import STEP
from ds_basisrot.sharding.buffers import Flat
from ds_basisrot.sharding.optimizer import ShardedBasisRotation

from .placement import Lot

# Elements of all ranks that are gathered in one message, about: so many that latency does not matter, so few that buffers stay small.
GATHERED_NUMEL = 2**26

OPTIONS = ("lr", "betas", "eps", "weight_decay")


class Slice(NamedTuple):
    """A slice of one of Megatron's tensors, and where it lies in a flat buffer.

    Attributes:
        tensor: float32, contiguous.
        first: its first element in the flattened tensor.
        start: its first element in the buffer.
        numel: elements.
    """

    tensor: Tensor
    first: int
    start: int
    numel: int

    def weight(self) -> Tensor:
        """The slice, flat; writing to it counts as a change of the tensor, as autograd sees it."""
        return self.tensor.detach().view(-1)[self.first : self.first + self.numel]

    def gradient(self) -> Tensor:
        """Of the slice, flat; zeros where there is none."""
        if self.tensor.grad is None:
            return torch.zeros(self.numel, device=self.tensor.device)
        return self.tensor.grad.reshape(-1)[self.first : self.first + self.numel]


class Share:
    """A flat buffer of this rank, filled from Megatron's tensors for the time of an update.

    Args:
        lot: what it holds on all ranks.
        replica: this rank in the data-parallel group.
        group: process group that shares the lot.
        tensors: by name, what Megatron's optimizer updates: whole parts of parameters, or this rank's slices of them.
        whole: whether `tensors` are whole parts, the same on all replicas, which get each other's updates.
    """

    def __init__(self, lot: Lot, replica: int, group: Any, tensors: Mapping[str, Tensor], whole: bool):
        self.lot, self._replica = lot, replica
        device = lot.members[0].parameter.device
        # One element more than it holds: a buffer that holds nothing takes part in the exchange like any other.
        self.buffer = torch.nn.Parameter(torch.zeros(lot.numels[replica] + 1, device=device))
        labels = {member.name: member.label for member in lot.members if member.label}
        self.flat = Flat(self.buffer, group, tuple(lot.parameters()), labels)
        of_replicas = range(len(lot.placed)) if whole else [replica]
        self._slices = {
            other: [Slice(tensors[m.name], cut.offset if whole else 0, start, cut.numel) for m, cut, start in lot.placed[other]]
            for other in of_replicas
        }
        self.release()

    def load(self) -> None:
        """Take weights and gradients in."""
        slices = self._slices[self._replica]
        end = torch.zeros(1, device=self.buffer.device)
        self.buffer.data = torch.cat([*(each.weight() for each in slices), end])
        self.buffer.grad = torch.cat([*(each.gradient() for each in slices), end])

    def store(self) -> None:
        """Give the weights back."""
        for each in self._slices[self._replica]:
            each.weight().copy_(self.buffer.data[each.start : each.start + each.numel])

    def gather(self, replicas: Any) -> None:
        """Take over what the other data-parallel ranks have updated. Every rank of the group `replicas` calls it."""
        size, longest = dist.get_world_size(replicas), max(self.lot.numels)
        most = -(-GATHERED_NUMEL // size)
        for first in range(0, longest, most):
            numel = min(most, longest - first)
            sent = self.buffer.data[: self.lot.numels[self._replica]][first : first + numel]
            sent = torch.nn.functional.pad(sent, (0, numel - sent.numel()))
            received = sent.new_empty(size * numel)
            dist.all_gather_into_tensor(received, sent, group=replicas)
            for other, slices in self._slices.items():
                for each in slices if other != self._replica else ():
                    begin, end = max(each.start, first), min(each.start + each.numel, first + numel)
                    if begin < end:
                        each.weight()[begin - each.start : end - each.start].copy_(
                            received[other * numel + begin - first : other * numel + end - first]
                        )

    def release(self) -> None:
        """Give up the storage until the next update."""
        self.buffer.grad = None
        self.buffer.data = self.buffer.data.new_empty(0)


class InnerBasisRotation(torch.optim.Optimizer):
    """What Megatron's optimizers call in the place of Adam: over their own groups, with BasisRotation on flat buffers behind it.

    `step()` is a collective operation of the data-parallel group, and of the tensor-parallel one. What Megatron stores of an optimizer's
    state with `state_dict()` is the number of steps; those of BasisRotation are in `rotation_states.sharded`.

    Args:
        groups: Megatron's, as the Adam had them.
        rotation: bound to the buffers of `shares`.
        shares: for each of the rotation's groups, in order, its buffers.
        indices: of each of the rotation's groups, the index in `groups`.
        replicas: data-parallel group whose ranks all hold all weights; None: each holds its own slices.
        tensor_parallel: group whose ranks must skip an update together.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rotation: ShardedBasisRotation,
        shares: Sequence[Share],
        indices: Sequence[int],
        replicas: Any,
        tensor_parallel: Any,
    ):
        self.rotation = rotation
        self._shares, self._indices, self._replicas, self._tensor_parallel = list(shares), list(indices), replicas, tensor_parallel
        # Megatron puts slices that are no leaves into an optimizer's groups after it is built, and so do we.
        super().__init__([torch.zeros(0)], dict(rotation.defaults))
        self.param_groups = groups
        self._keep_steps()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up options and the number of steps; other states that it may have are Adam's, and are left out."""
        super().load_state_dict(state_dict)
        self._keep_steps()

    def _keep_steps(self) -> None:
        """The number of steps is all that Megatron sees of the states; what it has loaded, of another stage, may lack some parameters."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        steps = max((self.state[p][STEP] for p in parameters if STEP in self.state[p]), default=torch.zeros(()))
        for p in parameters:
            self.state[p] = {STEP: torch.as_tensor(steps).clone()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of everything in the groups; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, options in zip(self._indices, self.rotation.param_groups):
            options.update({key: self.param_groups[index][key] for key in OPTIONS if key in self.param_groups[index]})
        for share in self._shares:
            share.load()
        self._agree_on_usable()
        self.rotation.step()
        for share in self._shares:
            share.store()
            if self._replicas is not None:
                share.gather(self._replicas)
            share.release()
        for state in self.state.values():  # after loading, Megatron's distributed optimizer lets them share a tensor
            state[STEP] = state[STEP] + 1
        return loss

    def _agree_on_usable(self) -> None:
        """A gradient that is not finite on one tensor-parallel rank is none on any, so that copies of parameters stay equal."""
        if self._tensor_parallel is None or not self._shares:
            return
        largest = torch.stack([share.buffer.grad.abs().max() for share in self._shares])
        unusable = (~largest.isfinite()).any().to(torch.float32)
        dist.all_reduce(unusable, op=dist.ReduceOp.MAX, group=self._tensor_parallel)
        for share in self._shares:
            share.buffer.grad[0].copy_(torch.where(unusable > 0, torch.nan, share.buffer.grad[0]))
