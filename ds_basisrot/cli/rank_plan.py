"""What each rank of a data-parallel group keeps, computes and exchanges when ZeRO shares the parameters, from their shapes alone."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ds_basisrot.cli.cost_plan import ADAMW_BYTES, rotation_entries
from ds_basisrot.optim.basis_rotation import BasisRotation
from ds_basisrot.optim.roles import Role, assign_roles
from ds_basisrot.sharding.exchange import messages
from ds_basisrot.sharding.layouts import LAYOUTS, one_buffer
from ds_basisrot.sharding.ownership import Ownership, assign
from ds_basisrot.sharding.units import Unit, units_of

ELEMENT_BYTES = 4
"""Gradients go to owners, and updates come back, in float32."""


def rank_plan(model: nn.Module, options: Mapping[str, Any], stage: int, ranks: int) -> dict[str, Any]:
    """The figures of `ds-basisrot plan --ranks`, as plain data.

    All trainable parameters are one group of the optimizer, in the model's order, which is what DeepSpeed makes of `model.parameters()`.

    Args:
        model: its parameters may be on the meta device.
        options: all of BasisRotation's options, checked before.
        stage: of ZeRO. With 0, every rank keeps and does everything.
        ranks: of the data-parallel group.

    Returns:
        "mean" and "most" of the ranks, and their ratio, the "imbalance", of "rotation_state_bytes", of "state_bytes", which AdamW's state
        of the other parameters is part of, of "update_madds" with refreshes, and of "exchanged_bytes", which a rank sends and likewise
        receives in an update. Most "update_madds" are those of the busiest rank of each update, on average over a period, as ranks wait
        for each other; "imbalance_at_once" is what they would be without stagger. "matrices" in all, "moving" to another rank, and of
        these "cut", because several ranks hold slices, the others for balance; "messages" in each direction; "by_rank" has lists.
    """
    sharers = ranks if stage else 1
    copies = ranks // sharers
    entries = rotation_entries(model, options)
    roles = _roles(entries, options)
    pieces = dict(zip(entries, LAYOUTS.get(stage, one_buffer)([p.numel() for p, _ in entries.values()], sharers)))
    other = [0] * sharers
    for name in entries:
        for piece in () if roles[name].stacks else pieces[name]:
            other[piece.rank] += ADAMW_BYTES * piece.numel

    def shared(roles: Mapping[str, Role]) -> tuple[list[Unit], Ownership]:
        rotated = [name for name in entries if roles[name].stacks]
        units = [unit for name in rotated for unit in units_of(name, entries[name][0].shape, roles[name], pieces[name])]
        ownership = assign([unit.load(options["state_dtype"]) for unit in units], sharers)
        for unit, owner in zip(units, ownership.owners):
            unit.owner = owner
        return units, ownership

    units, ownership = shared(roles)
    _, at_once = shared(_roles(entries, {**options, "stagger": False}))
    moving = [unit for unit in units if not unit.stays]
    state_bytes = [sum(both) for both in zip(ownership.state_bytes, other)]
    return {
        "stage": stage,
        "ranks": ranks,
        "rotation_state_bytes": _spread(ownership.state_bytes),
        "state_bytes": _spread(state_bytes),
        "update_madds": {**_spread(ownership.madds, ownership.busiest_madds), "imbalance_at_once": at_once.work_imbalance},
        "exchanged_bytes": _spread([ELEMENT_BYTES * sum(both) for both in zip(ownership.sent, ownership.received)]),
        "matrices": {"all": len(units), "moving": len(moving), "cut": sum(len(unit.pieces) > 1 for unit in moving)},
        "messages": len(messages(moving)),
        "by_rank": {
            "rotation_state_bytes": list(ownership.state_bytes) * copies,
            "state_bytes": state_bytes * copies,
            "update_madds": list(ownership.madds) * copies,
            "sent_gradient_numbers": list(ownership.sent) * copies,
            "received_gradient_numbers": list(ownership.received) * copies,
        },
    }


def _roles(entries: Mapping[str, tuple], options: Mapping[str, Any]) -> dict[str, Role]:
    """The role of each parameter in an optimizer of all of them."""
    names = [name for name in inspect.signature(BasisRotation).parameters if name not in ("params", "rotate")]
    group = {"params": [(name, p) for name, (p, _) in entries.items()], "rotate": [entry for _, entry in entries.values()]}
    roles = assign_roles(BasisRotation([group], **{name: options[name] for name in names}).param_groups, None)
    return {name: roles[p] for name, (p, _) in entries.items()}


def _spread(of_ranks: Sequence[int], most: int | None = None) -> dict[str, float]:
    """Mean and largest value, and their ratio; 1 where there is nothing."""
    mean, most = sum(of_ranks) / len(of_ranks), max(of_ranks) if most is None else most
    return {"mean": mean, "most": most, "imbalance": most / mean if mean else 1.0}
