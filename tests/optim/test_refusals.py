"""Mistakes in groups, layouts and tags are refused in one line or warned of, and leave the optimizer as it was."""

import pytest
import torch
from torch import nn

from ds_basisrot import BasisRotation, param_groups, tag
from ds_basisrot.optim.inspection import measure

NAMES = ["q", "k", "v"]


@pytest.mark.parametrize(
    "saved, present",
    [
        ({"rows": [8, 8, 8], "names": NAMES}, {"rows": [2, 2, 2], "groups": 4, "names": NAMES}),
        ({"rows": [8, 8, 8], "names": NAMES}, {"rows": [8, 8, 8], "names": ["k", "q", "v"]}),
        (True, {"transposed": True}),
    ],
)
def test_a_state_of_another_layout_is_refused(saved, present):
    parameter = nn.Parameter(torch.randn(24, 24))
    optimizer, other = (BasisRotation([{"params": [("w", parameter)], "rotate": [layout]}]) for layout in (saved, present))
    parameter.grad = torch.randn(24, 24)
    optimizer.step()
    with pytest.raises(ValueError, match="saved state of w .* is of other matrices"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state
    BasisRotation([{"params": [("w", parameter)], "rotate": [saved]}]).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    "group, message",
    [
        ({"params": [nn.Parameter(torch.zeros(4, 4))], "geometry": "bilat"}, "geometry: must be one of"),
        ({"params": [nn.Parameter(torch.zeros(4, 4))], "geometri": "auto"}, "did you mean 'geometry'"),
        ({"params": [nn.Parameter(torch.zeros(4, 4))], "Staleness": 3}, "did you mean 'staleness'"),
        ({"params": [nn.Parameter(torch.zeros(4, 4))], "layout": {}}, "put layouts into 'rotate'"),
        ({"params": [nn.Parameter(torch.zeros(4, 4))], "lr": torch.ones(2)}, "lr: must be a number"),
        ({"params": [nn.Parameter(torch.zeros(4))], "rotate": True}, "rotate"),
        ({"params": [nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))]}, "complex"),
    ],
)
def test_a_refused_group_is_not_added(group, message):
    parameter = nn.Parameter(torch.zeros(4, 4))
    optimizer = BasisRotation([parameter])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    parameter.grad = torch.randn(4, 4)
    optimizer.step()


def test_a_part_without_a_rotated_matrix_is_said(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = BasisRotation(param_groups(model), rotate={"exclude": ["0.*"]})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert "no parameter is rotated" in caplog.text


def test_sharing_refreshes_without_different_staleness_is_said(caplog):
    for stalenesses, warned in (((0.0, 0.0), True), ((3.0, 0.0), False)):
        caplog.clear()
        parameters = [nn.Parameter(torch.zeros(4, 4)) for _ in stalenesses]
        optimizer = BasisRotation(
            [{"params": [p], "staleness": staleness} for p, staleness in zip(parameters, stalenesses)], refresh_allocation="stage_aware"
        )
        for p in parameters:
            p.grad = torch.randn(4, 4)
        optimizer.step()
        assert ("same as uniform" in caplog.text) is warned


def test_wrong_tags_are_refused():
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="tag: rotate must be true or false"):
        tag(weight, rotate="no")
    with pytest.raises(ValueError, match="tag: takes a parameter"):
        tag(nn.Linear(4, 4))


def test_unknown_keys_of_rotate_name_the_right_one():
    with pytest.raises(ValueError, match="rotate: unknown key 'exlude'; did you mean 'exclude'"):
        BasisRotation([("w", nn.Parameter(torch.zeros(4, 4)))], rotate={"exlude": []})


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match="limit"):
        measure(BasisRotation([nn.Parameter(torch.zeros(4, 4))]), limit=-1)
