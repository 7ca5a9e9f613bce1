"""A parameter's saved state, checked and made fit for how the parameter is rotated now."""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from .adam_state import from_adam
from .roles import Role
from .state import MOMENTUM, SECOND_MOMENT, STEP, check_layout_of_state, check_state, complete_state, new_state


def loaded_state(p: Tensor, role: Role, group: dict[str, Any], saved: Mapping[str, Any], layout: Any = None) -> dict[str, Any]:
    """A state with storage of its own, on p's device, from a saved one, which may be Adam's.

    Args:
        p: the parameter, for its device and shape.
        group: its options.
        saved: of the same shape; with tensors on any device, of any precision.
        layout: the parameter's entry in `rotate` when it was saved (None: not known).

    Raises:
        ValueError: it is of another routing, layout, geometry, source or shape.
    """
    saved = dict(saved)
    if role.stacks and is_adams(saved):
        if saved[MOMENTUM].shape != p.shape:
            raise ValueError(f"the saved {MOMENTUM} of {role.name} has shape {list(saved[MOMENTUM].shape)}: it is of another model")
        return from_adam(p, role.stacks, group, int(saved[STEP]), saved[MOMENTUM], saved[SECOND_MOMENT])
    check_layout_of_state(p, layout, role.stacks, role.name)
    expected = new_state(p, role.stacks, group, 1.0, meta=True)
    saved = complete_state(saved, expected)
    check_state(saved, expected, role.name)
    return {
        key: value.detach().to(p.device, expected[key].dtype, copy=True) if torch.is_tensor(value) else copy(value)
        for key, value in saved.items()
    }


def is_adams(saved: Mapping[str, Any]) -> bool:
    """Whether a saved state is that of torch's or DeepSpeed's Adam: with moments in the parameter's own basis and no bases."""
    return {MOMENTUM, SECOND_MOMENT, STEP} <= set(saved)
