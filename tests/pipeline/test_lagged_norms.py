"""Norms that one stage clips by: in float32, whatever a script has made torch's default."""

import math

import pytest
import torch

from ds_basisrot.pipeline.lagged_norms import LaggedNorms


@pytest.fixture
def bfloat16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_norm_and_factor_do_not_depend_on_the_default_dtype(bfloat16_by_default):
    norms = LaggedNorms(1, 3, "lagged_global", torch.device("cpu"))
    norms.from_previous(torch.tensor([1.2345, 9.0, 9.0], dtype=torch.float32))
    norms.from_next(torch.tensor([9.0, 9.0, 2.3456], dtype=torch.float32))
    total = norms.total(torch.tensor(3.4567, dtype=torch.float32), 1.5)
    expected = math.sqrt(1.2345**2 + 3.4567**2 + 2.3456**2)
    assert total.item() == pytest.approx(expected, rel=1e-6)
    assert norms.clips and norms.factor.item() == pytest.approx(1.5 / expected, rel=1e-6)


@pytest.mark.parametrize("own", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_clips_once_and_is_not_kept(own):
    norms = LaggedNorms(0, 2, "lagged_global", torch.device("cpu"))
    norms.total(torch.tensor(2.0), 1.0)
    assert not math.isfinite(norms.total(torch.tensor(own), 1.0).item()) and norms.clips
    assert norms.known.tolist() == [2.0, 0.0]
    norms.total(torch.tensor(0.5), 1.0)
    assert not norms.clips and norms.factor.item() == 1.0
