"""What connects one stage to others: process groups and tags, and what to say when the process at the other end has gone."""

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ACTIVATIONS, GRADIENTS, TIED = 1, 2, 3
"""Tags. DeepSpeed's own messages have tag 0."""

GONE = ("by peer", "Broken pipe", "Read error", "Write error")
"""In what Gloo says when a process at the other end has ended."""

LATE = ("Timed out", "timeout caused")
"""In what Gloo says when a process at the other end has not answered for as long as its group allows."""


def is_late(error: Exception) -> bool:
    """Whether Gloo says that."""
    return any(sign in str(error) for sign in LATE)


def is_of_gloo(error: Exception) -> bool:
    """Whether Gloo says this: it begins with the place in its sources."""
    return re.match(r"\[\S*gloo/", str(error)) is not None


def first_words(error: Exception) -> str:
    """What Gloo says, without where in its sources it does and what it advises."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).split(". ")[0].split("\n")[0] or type(error).__name__


class Channel:
    """Messages in one direction, from or to one other stage.

    Args:
        me, stage: this stage and the other.
        rank: the other's global rank.
        group, tag: that messages travel in.
        device: of the messages.
    """

    def __init__(self, me: int, stage: int, rank: int, group: Any, tag: int, device: torch.device):
        self.me, self.stage, self.rank, self.group, self.tag = me, stage, rank, group, tag
        self._rank_in_group = dist.get_group_rank(group, rank)
        self._backend = group._get_backend(device)  # the group itself asks torch's dispatcher for it, at each message

    def send(self, tensor: Tensor) -> Any:
        """Start to send; returns what to wait for."""
        try:
            return self._backend.send([tensor], self._rank_in_group, self.tag)
        except RuntimeError as error:
            raise self._lost(error) from None

    def receive(self, tensor: Tensor) -> Any:
        """Start to receive; returns what to wait for."""
        try:
            return self._backend.recv([tensor], self._rank_in_group, self.tag)
        except RuntimeError as error:
            raise self._lost(error) from None

    def wait(self, work: Any) -> None:
        """Wait for what was started."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> RuntimeError:
        if is_late(error):
            return RuntimeError(
                f"stage {self.me} has waited too long for stage {self.stage} (rank {self.rank}): look for what that process is doing "
                f"({first_words(error)})"
            )
        return RuntimeError(
            f"stage {self.me} lost its connection to stage {self.stage} (rank {self.rank}): that process has ended, look for what it said "
            f"({first_words(error)})"
        )


def group_of_pair(pair: tuple[int, int], own: Any) -> Any:
    """A process group for one direction between two stages of a pipeline. Collective over the job where it makes one.

    Gloo keeps messages of different tags and pairs apart, so the pipeline's own group serves all: each group costs a thread that wakes up
    a hundred times a second. Other backends do what one group is asked to one after the other, so there each direction gets a group.

    Args:
        pair: global ranks.
        own: the process group of this rank's pipeline.
    """
    return own if dist.get_backend(own) == "gloo" else dist.new_group(list(pair))


@dataclass(frozen=True)
class Lane:
    """One direction between neighbours: data and, from an accelerator, control numbers apart (else None)."""

    data: Channel
    control: Channel | None

    @classmethod
    def of(cls, me: int, stage: int, rank: int, group: Any, control_group: Any, tag: int, device: torch.device) -> "Lane":
        """The channels between `me` and another stage."""
        control = None if control_group is None else Channel(me, stage, rank, control_group, tag, torch.device("cpu"))
        return cls(Channel(me, stage, rank, group, tag, device), control)


class Lanes:
    """The lanes of this rank from and to its neighbours in the pipeline; None where there is no neighbour.

    Every rank of the job must build one, at the same time: creating process groups is collective.

    From an accelerator, control numbers travel as messages of their own between the processors, so that no host waits for it.

    Args:
        pipelines: for every pipeline of the job, the global ranks of its stages in order.
        own: the process group of this rank's pipeline.
        device: of the messages.
    """

    def __init__(self, pipelines: list[list[int]], own: Any, device: torch.device):
        me = dist.get_rank()
        self.from_previous = self.to_previous = self.to_next = self.from_next = None
        for ranks in pipelines:
            controls = dist.new_group(ranks, backend="gloo") if device.type != "cpu" else None
            for stage, (first, second) in enumerate(zip(ranks, ranks[1:])):
                activations, gradients = (group_of_pair((first, second), own) for _ in range(2))
                if me == first:
                    to = (stage, stage + 1, second)
                    self.to_next = Lane.of(*to, activations, controls, ACTIVATIONS, device)
                    self.from_next = Lane.of(*to, gradients, controls, GRADIENTS, device)
                elif me == second:
                    to = (stage + 1, stage, first)
                    self.from_previous = Lane.of(*to, activations, controls, ACTIVATIONS, device)
                    self.to_previous = Lane.of(*to, gradients, controls, GRADIENTS, device)
