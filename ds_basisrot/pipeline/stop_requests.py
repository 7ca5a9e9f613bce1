"""Stopping all stages of an asynchronous pipeline after the same update, without a rendezvous between them."""

NEVER = -1


class StopRequests:
    """What a stage knows about the update after which all stop.

    A request travels to the first stage with the gradients. The first stage names an update that is so far ahead that its activations
    tell every stage before.

    Args:
        stages: of the pipeline.

    Attributes:
        wanted: this process was asked to stop, or has heard of one that was.
        agreed: all replicas of this stage know that one of them was.
        after: the last update, or NEVER.
    """

    def __init__(self, stages: int):
        self._stages = stages
        self.wanted = self.agreed = False
        self.after = NEVER

    def heard(self, wanted: int, after: int) -> None:
        """Take in what a neighbour's message said."""
        self.wanted = self.wanted or bool(wanted)
        if after != NEVER:
            self.after = after

    def decide(self, update: int, accumulation: int) -> None:
        """On the first stage, before it makes `update`: name the last one, if a stop is wanted on a replica."""
        if self.agreed and self.after == NEVER:
            self.after = update + (self._stages - 1) // accumulation

    def due(self, updates: int) -> bool:
        """Whether it is time, after so many updates."""
        return self.after != NEVER and updates > self.after
