"""BasisRotation over flat buffers: each rank holds slices of parameters, and whole matrices are updated by the rank that owns them."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim.basis_rotation import RESTORED_OPTIONS, BasisRotation
from ..optim.gradient_gate import Gate
from ..optim.roles import Role, assign_roles
from ..optim.state import STEP
from ..optim.updates import MatrixUpdates, Work
from .buffers import Buffer, Flat, Member, Message
from .ownership import Ownership, assign

logger = logging.getLogger("ds_basisrot")


class ShardedBasisRotation(torch.optim.Optimizer):
    """BasisRotation for wrappers that slice parameters over a data-parallel group, such as DeepSpeed's ZeRO.

    It is built over whole parameters, like any optimizer; a wrapper then puts flat buffers in their place, which `bind` explains. From
    then on `step()` updates the buffers that have a gradient: slices of a rotated matrix go to its owner, which keeps the state, and the
    owner's update comes back. Other parameters are updated where their slices are.

    `step()` is a collective operation of each buffer's group.

    Args:
        blueprint: the same optimizer over stand-ins on the meta device, in whole shapes, with names.
        parameters: for each of its groups, the parameters in its order.

    Attributes:
        buffers: what is bound.
        own_states: states of what this rank owns or holds a slice of.
        ownership: of each process group, by its ranks.
    """

    def __init__(self, blueprint: BasisRotation, parameters: Sequence[Sequence[Tensor]]):
        self.blueprint, self._bound = blueprint, {}
        self._whole = self._groups()
        self._updates = _OwnUpdates()
        self.ownership: dict[str, Ownership] = {}
        groups = [{**group, "params": list(own)} for group, own in zip(blueprint.param_groups, parameters)]
        super().__init__(groups, blueprint.defaults)

    @property
    def skipped_updates(self) -> int:
        """As of BasisRotation."""
        return self._updates.skipped_updates

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """Precision that the gradients were computed in, where it is not float32."""
        return self._updates.gradient_dtype

    @gradient_dtype.setter
    def gradient_dtype(self, dtype: torch.dtype | None) -> None:
        self._updates.gradient_dtype = dtype

    @property
    def buffers(self) -> list[Buffer]:
        """What is bound, in its order."""
        return list(self._bound.values())

    @property
    def own_states(self) -> dict[Tensor, Any]:
        """States of what this rank owns, or holds a slice of, by what stands for it."""
        return self._updates.state

    def states_of_groups(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(options, state) of everything on this rank that has a state."""
        present = {id(built): group for built, group in zip(self.blueprint.param_groups, self.param_groups)}
        members = [member for buffer in self.buffers for member in buffer.members]
        states = ((present[id(self.options_of(member.parameter))], self.own_states.get(member.p)) for member in members)
        return ((options, state) for options, state in states if state)

    def state_bytes(self) -> int:
        """Bytes of the states of rotated matrices on this rank."""
        rotated = [member.p for buffer in self.buffers for member in buffer.members if member.role.stacks]
        return sum(t.nbytes for p in rotated for t in self.own_states.get(p, {}).values() if torch.is_tensor(t))

    def settle(self) -> None:
        """Learn what became of the last update, where the host did not wait for it."""
        self._updates._settle()

    def options_of(self, name: str) -> dict[str, Any]:
        """Options that a parameter was built with."""
        return self._whole[name][0]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take in what a wrapper has loaded; `states.restore` makes states of it. Options of this run win, but for RESTORED_OPTIONS."""
        kept = [{k: v for k, v in group.items() if k != "params" and k not in RESTORED_OPTIONS} for group in self.param_groups]
        steps = [group.get("step") for group in state_dict["param_groups"] for _ in group["params"]]  # where some Adams keep it
        state = {
            key: {STEP: steps[key], **own} if isinstance(key, int) and steps[key] is not None else own
            for key, own in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})
        for group, options in zip(self.param_groups, kept):
            group.update(options)

    def describe(self) -> str:
        """How many matrices are rotated on which sides, in words; of all ranks together."""
        return self.blueprint.describe()

    def refresh_cost(self) -> int:
        """Multiply-adds of refreshing all matrices of all ranks once."""
        return self.blueprint.refresh_cost()

    def share_refreshes(self, staleness: Sequence[float], costs: Sequence[float], stage: int) -> None:
        """As of BasisRotation."""
        self._updates._settle()
        self.blueprint.share_refreshes(staleness, costs, stage)
        roles = self._roles()
        for bound in self._bound.values():
            for unit, name, index in bound.units:
                unit.role.follow(roles[name], index)

    def bind(self, flats: Sequence[Flat]) -> None:
        """Say what the flat buffers hold that are in the groups now. Every rank calls it with its own view of the same buffers, in order.

        Raises:
            ValueError: a buffer that is not flat float32, or a parameter that is not in the blueprint.
        """
        roles, groups = self._roles(), self._whole
        self._bound = {}
        ranks_before: dict[int, tuple[int, int]] = {}
        of_group: dict[int, list[Buffer]] = {}
        for flat in flats:
            if flat.buffer.dtype != torch.float32 or flat.buffer.ndim != 1:
                what = f"{flat.buffer.dtype} with shape {list(flat.buffer.shape)}"
                raise ValueError(f"BasisRotation keeps master weights in flat float32 buffers, got {what}")
            bound = Buffer(flat, *_rank_and_size(flat.group))
            for name, pieces in flat.parameters:
                if name not in roles:
                    raise ValueError(f"{name} is in a flat buffer, but not among the parameters that BasisRotation was built for")
                bound.add(name, groups[name][1], roles[name], tuple(pieces))
            self._bound[flat.buffer] = bound
            of_group.setdefault(id(flat.group), []).append(bound)
        # The largest group first: what its matrices cost is known to the members of smaller ones, which are parts of it.
        for members in sorted(of_group.values(), key=lambda each: -each[0].ranks):
            self._assign(members, groups, ranks_before)
        self._updates._plan = {member.p: member.role for bound in self._bound.values() for member in bound.members}

    def _assign(self, bounds: "list[Buffer]", groups: Mapping[str, tuple], before: dict[int, tuple[int, int]]) -> None:
        """Owners of the matrices in the buffers of one process group."""
        units = [(bound, unit, name) for bound in bounds for unit, name, _ in bound.units]
        loads = [unit.load(groups[name][0]["state_dtype"]) for _, unit, name in units]
        world = [_global_rank(bounds[0].flat.group, rank) for rank in range(bounds[0].ranks)]
        ownership = assign(loads, bounds[0].ranks, [before.get(rank, (0, 0)) for rank in world])
        for (_, unit, _), owner in zip(units, ownership.owners):
            unit.owner = owner
        before.update(zip(world, zip(ownership.madds, ownership.state_bytes)))
        self.ownership[",".join(map(str, world))] = ownership
        for bound in bounds:
            bound.take_owners()

    def _roles(self) -> dict[str, Role]:
        """The role of each parameter, by name."""
        roles = assign_roles(self.blueprint.param_groups, self.blueprint._stages)
        return {name: roles[p] for name, (_, p) in self._named().items()}

    def _named(self) -> dict[str, tuple[dict, Tensor]]:
        return {name: (group, p) for group in self.blueprint.param_groups for name, p in zip(group["param_names"], group["params"])}

    def _groups(self) -> dict[str, tuple[dict, tuple[int, ...]]]:
        """Options and whole shape of each parameter, by name."""
        return {name: (group, tuple(p.shape)) for name, (group, p) in self._named().items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every buffer that has a gradient; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel() > 0]
        batches: dict[int, list[tuple[dict, Buffer]]] = {}
        for group, p in work:
            if p in self._bound:
                batches.setdefault(id(self._bound[p].flat.group), []).append((group, self._bound[p]))
            elif p.grad.any():  # wrappers make a step with zeros when they are built
                raise RuntimeError(
                    "BasisRotation was given flat buffers, but not told what they hold: it runs under ZeRO from the JSON only"
                )
        for batch in batches.values():
            self._updates._settle()
            with torch.autocast(batch[0][1].flat.buffer.device.type, enabled=False):
                self._step(batch)
            for _, bound in batch:
                bound.release_members()
        return loss

    def _step(self, batch: "list[tuple[dict, Buffer]]") -> None:
        """One update of the buffers of one process group."""
        group, updates = batch[0][1].flat.group, self._updates
        sizes = torch.cat([bound.own_sizes() for _, bound in batch])
        sizes = torch.where(sizes.isnan(), torch.inf, sizes)  # which a maximum does not always keep
        _all_reduce(sizes, dist.ReduceOp.MAX, group)
        sizes_of, first = [], 0
        for _, bound in batch:
            sizes_of.append(sizes[first : first + bound.count])
            first += bound.count
            bound.place_members()

        members = [(options, member) for options, bound in batch for member in bound.members]
        theirs = torch.cat([bound.of_members(its) for its, (_, bound) in zip(sizes_of, batch)])
        work: Work = [(options, member.p) for options, member in members]
        decision = updates._decide(work, theirs, lambda usable: _all_agree(usable, sizes.device, group))
        # A skipped update exchanges like any other: on an accelerator, ranks without cold matrices do not know yet that it is one.
        admitted_work, gate = decision or ([], Gate(torch.zeros((), dtype=torch.bool, device=sizes.device)))
        admitted = {id(p) for _, p in admitted_work}
        for its, (_, bound) in zip(sizes_of, batch):
            bound.note_started(its, gate)

        def update(chosen: "list[Member]", options: dict) -> None:
            updates._update([(options, member.p) for member in chosen if id(member.p) in admitted], gate)

        transfers = [(options, bound, message) for options, bound in batch for message in bound.messages]
        gathering = self._start(transfers[0]) if transfers else None
        for options, bound in batch:
            update([member for member in bound.members if not member.moves], options)
        returning = []
        for number, (options, bound, message) in enumerate(transfers):
            message.receive(gathering.wait())
            gathering = self._start(transfers[number + 1]) if number + 1 < len(transfers) else None
            update(message.owned, options)
            returning.append((options, bound, message, message.exchange.scatter(message.results())))
            if len(returning) > 1:
                self._apply(*returning.pop(0), gate)
        for each in returning:
            self._apply(*each, gate)

    @staticmethod
    def _start(transfer: tuple) -> Any:
        _, bound, message = transfer
        return message.exchange.gather({unit.name: bound.gradient(piece) for unit, _, piece in message.held})

    @staticmethod
    def _apply(options: dict, bound: "Buffer", message: "Message", scattering: Any, gate: Gate) -> None:
        slices = scattering.wait()
        decay = gate.decay(1 - float(options["lr"]) * options["weight_decay"])
        for unit, index, piece in message.held:
            if bound.started[index]:
                bound.weight(piece).mul_(decay).add_(slices[unit.name])


class _OwnUpdates(MatrixUpdates):
    """The updates of what this rank owns, or holds a slice of."""

    def __init__(self) -> None:
        self.state: dict[Tensor, Any] = {}
        self._begin()
        self._plan = {}
        self.layout_independent = True


def _rank_and_size(group: Any) -> tuple[int, int]:
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def _global_rank(group: Any, rank: int) -> int:
    if not dist.is_initialized() or group is None or group is dist.group.WORLD:
        return rank
    return dist.get_global_rank(group, rank)


def _all_reduce(tensor: Tensor, operation: Any, group: Any) -> None:
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=operation, group=group)


def _all_agree(usable: Tensor, device: torch.device, group: Any) -> Tensor:
    """True where the flag is on every rank."""
    flag = usable.to(device, torch.uint8)
    _all_reduce(flag, dist.ReduceOp.MIN, group)
    return flag.bool()
