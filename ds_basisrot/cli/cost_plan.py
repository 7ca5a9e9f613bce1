"""What BasisRotation costs a model: state, multiply-adds, and their spread over the updates, from the parameters' shapes alone."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import nn

from ds_basisrot.optim import refresh
from ds_basisrot.optim.costs import MatrixCost, matrix_cost, state_bytes
from ds_basisrot.optim.eigenbasis import GEOMETRIES, rotated_sides
from ds_basisrot.optim.layout import Part, parts
from ds_basisrot.optim.routing import param_groups

ADAMW_BYTES = 8
"""For each number of a parameter: two moments in float32."""

SIDES = {(True, True): "both", (True, False): "left", (False, True): "right", (False, False): "none"}


@dataclass(frozen=True)
class Matrices:
    """The equal matrices of one part of a parameter, and what one of them costs."""

    parameter: str
    part: Part
    sides: tuple[bool, bool]
    cost: MatrixCost


def cost_plan(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `ds-basisrot plan`, as plain data.

    Args:
        model: its parameters may be on the meta device.
        options: all of BasisRotation's options, checked before.

    Returns:
        "rows": one for each part, shape and rotated sides, with the figures of all its matrices together; "totals" of the model;
        "geometries": the totals that each geometry would give.

    Raises:
        ValueError: patterns that match nothing or do not fit, or nothing to rotate.
    """
    entries = rotation_entries(model, options)
    return {
        "rows": _rows(_matrices(entries, options), options),
        "totals": _totals(entries, options),
        "geometries": {geometry: _totals(entries, {**options, "geometry": geometry}) for geometry in GEOMETRIES},
    }


def rotation_entries(model: nn.Module, options: Mapping[str, Any]) -> dict[str, tuple]:
    """Each trainable parameter and its `rotate` entry, by name, in the model's order.

    Raises:
        ValueError: as `cost_plan`.
    """
    groups = param_groups(model, rotate=options["rotate"])
    entries = {name: entry for group in groups for (name, _), entry in zip(group["params"], _entries(group))}
    return {name: (p, entries[name]) for name, p in model.named_parameters() if name in entries}


def _entries(group: Mapping[str, Any]) -> Sequence[Any]:
    return group["rotate"] if isinstance(group["rotate"], (list, tuple)) else [group["rotate"]] * len(group["params"])


def _matrices(entries: Mapping[str, tuple], options: Mapping[str, Any]) -> list[Matrices]:
    """The rotated parameters' matrices. As in the optimizer, a parameter with no side to rotate anywhere is not rotated."""
    result = []
    for name, (parameter, entry) in entries.items():
        own = []
        for part in parts(parameter.shape, entry):
            m, n = part.shape[1:]
            sides = rotated_sides((m, n), options["geometry"], options["max_dim"], options["auto_budget"])
            own.append(Matrices(name, part, sides, matrix_cost(m, n, sides, options["source"] == "second_order")))
        if any(any(each.sides) for each in own):
            result += own
    return result


def _rows(matrices: Sequence[Matrices], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    alike = defaultdict(list)
    for each in matrices:
        alike[each.part.name, each.part.shape[1:], each.sides].append(each)
    rows = []
    for (part, shape, sides), members in alike.items():
        count, cost = sum(each.part.shape[0] for each in members), members[0].cost
        rows.append(
            {
                "parameters": [each.parameter for each in members],
                "part": part,
                "shape": list(shape),
                "sides": SIDES[sides],
                "matrices": count,
                "state_bytes": count * state_bytes(cost, options["state_dtype"]),
                "update_madds": count * cost.update_madds,
                "refresh_madds": count * cost.refresh_madds,
            }
        )
    return rows


def _totals(entries: Mapping[str, tuple], options: Mapping[str, Any]) -> dict[str, Any]:
    matrices = _matrices(entries, options)
    rotated = {each.parameter for each in matrices}
    rotated_numbers = sum(p.numel() for name, (p, _) in entries.items() if name in rotated)
    numbers = sum(p.numel() for p, _ in entries.values())
    rotated_bytes = sum(each.part.shape[0] * state_bytes(each.cost, options["state_dtype"]) for each in matrices)
    refreshes = [each.cost.refresh_madds for each in matrices for _ in range(each.part.shape[0])]
    return {
        "rotated_parameters": len(rotated),
        "rotated_matrices": len(refreshes),
        "rotated_numbers": rotated_numbers,
        "other_parameters": len(entries) - len(rotated),
        "other_numbers": numbers - rotated_numbers,
        "rotated_state_bytes": rotated_bytes,
        "other_state_bytes": ADAMW_BYTES * (numbers - rotated_numbers),
        "state_bytes": rotated_bytes + ADAMW_BYTES * (numbers - rotated_numbers),
        "adamw_state_bytes": ADAMW_BYTES * numbers,
        "update_madds": sum(each.part.shape[0] * each.cost.update_madds for each in matrices),
        "mean_refresh_madds": sum(refreshes) / options["refresh_period"],
        "worst_refresh_madds": _worst_update(refreshes, options["refresh_period"], options["stagger"]),
    }


def _worst_update(refreshes: Sequence[int], period: int, stagger: bool) -> int:
    """Multiply-adds of the refreshes that fall into the dearest update of a period."""
    offsets = refresh.offsets(refreshes, Fraction(1, period)) if stagger else [0] * len(refreshes)
    load: dict[int, int] = defaultdict(int)
    for offset, madds in zip(offsets, refreshes):
        load[offset] += madds
    return max(load.values(), default=0)


def name_pattern(name: str) -> str:
    """A parameter's name with * for the numbers of layers: "blocks.3.mlp.up.weight" is "blocks.*.mlp.up.weight"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
