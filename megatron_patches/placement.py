"""Where parameters lie when the ranks of a data-parallel group share their updates: in Megatron's buckets, or wherever we put them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ds_basisrot.optim.roles import Role
from ds_basisrot.sharding.layouts import cut_in_buffer, one_buffer
from ds_basisrot.sharding.ownership import assign
from ds_basisrot.sharding.units import Piece, units_of

from .matrices import Matrices


class Cut(NamedTuple):
    """A slice of a tensor-parallel rank's part of a parameter.

    Attributes:
        replica: data-parallel rank that holds it.
        offset: its first element in the flattened part.
        numel: elements.
    """

    replica: int
    offset: int
    numel: int


Cuts = Mapping[str, Sequence[Cut]]
"""By name of the parameter."""


@dataclass
class Lot:
    """The parameters of one of Megatron's groups that one process group shares, one after the other in a flat buffer on each rank.

    Attributes:
        index: of Megatron's parameter group.
        ranks: `ranks[shard][replica]` is a rank in the process group; one shard where tensor parallelism does not matter.
        placed: of each replica, what its buffer holds: (parameter, slice of its part, first element in the buffer).
        numels: elements in the buffer of each replica.
    """

    index: int
    ranks: Sequence[Sequence[int]]
    members: list[Matrices]
    placed: list[list[tuple[Matrices, Cut, int]]] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)

    def fill(self, cuts: Cuts) -> None:
        """Give every slice its place."""
        replicas = range(len(self.ranks[0]))
        self.placed, self.numels = [[] for _ in replicas], [0 for _ in replicas]
        for member in self.members:
            for cut in cuts[member.name]:
                self.placed[cut.replica].append((member, cut, self.numels[cut.replica]))
                self.numels[cut.replica] += cut.numel

    def parameters(self) -> list[tuple[str, tuple[Piece, ...]]]:
        """As `ds_basisrot.sharding.buffers.Flat` has them: every rank's slices of the parameters, whole over the shards."""
        pieces: dict[str, list[Piece]] = {member.name: [] for member in self.members}
        for replica, placed in enumerate(self.placed):
            for member, cut, start in placed:
                for shard, ranks in enumerate(self.ranks):
                    pieces[member.name].append(Piece(ranks[replica], start, shard * member.numel + cut.offset, cut.numel))
        return [(name, tuple(sorted(each, key=lambda piece: piece.offset))) for name, each in pieces.items()]


def cuts_of_buckets(members: Iterable[Matrices], buffers: Sequence[Any]) -> dict[str, list[Cut]]:
    """What each rank holds of the parameters where Megatron's distributed optimizer cuts every bucket into equal parts.

    Args:
        buffers: its `buffers`, with `param_index_map` and `buckets`.
    """
    placed: dict[Tensor, tuple[Any, int, int]] = {}
    for buffer in buffers:
        for parameter, (start, _, bucket) in buffer.param_index_map.items():
            placed[parameter] = buffer, start, bucket
    cuts = {}
    for member in members:
        buffer, start, index = placed[member.parameter]
        bucket = buffer.buckets[index]
        pieces = cut_in_buffer(start - bucket.offset, member.numel, bucket.grad_data.numel() // buffer.data_parallel_group.size())
        cuts[member.name] = [Cut(piece.rank, piece.offset, piece.numel) for piece in pieces]
    return cuts


def cuts_of_owners(members: Iterable[Matrices], held: Sequence[Iterable[str]]) -> dict[str, list[Cut]]:
    """Where every parameter is whole on one replica, and on no other.

    Args:
        held: for each replica, the names of its parameters.
    """
    owner_of = {name: replica for replica, names in enumerate(held) for name in names}
    return {member.name: [Cut(owner_of[member.name], 0, member.numel)] for member in members}


def cuts_by_cost(lots: Sequence[Lot], roles: Mapping[str, Role], state_dtype: str) -> dict[str, list[Cut]]:
    """Who updates what where every rank holds everything: whole matrices by what they cost, all else in equal parts.

    Args:
        lots: of one process group.
    """
    replicas = len(lots[0].ranks[0])
    members = [member for lot in lots for member in lot.members]
    cuts: dict[str, list[Cut]] = {}
    others = [member for member in members if not roles[member.name].stacks]
    for member, pieces in zip(others, one_buffer([member.numel for member in others], replicas)):
        cuts[member.name] = [Cut(piece.rank, piece.offset, piece.numel) for piece in pieces]
    units = [(m, unit) for m in members if roles[m.name].stacks for unit in units_of(m.name, m.shape, roles[m.name], ())]
    owners = assign([unit.load(state_dtype) for _, unit in units], replicas).owners
    offsets: dict[str, int] = {}
    for (member, unit), owner in zip(units, owners):
        numel, offset = unit.numel // member.shards, offsets.get(member.name, 0)
        cuts.setdefault(member.name, []).append(Cut(owner, offset, numel))
        offsets[member.name] = offset + numel
    return cuts
