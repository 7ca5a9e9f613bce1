"""What an engine tells its stage's optimizer of the other stages."""

from types import SimpleNamespace

import pytest
import torch

from ds_basisrot.deepspeed_plugin import shared_refreshes


class Sharing:
    """The part of BasisRotation that is asked."""

    param_groups = ({"refresh_allocation": "uniform", "refresh_period": 10},)
    told = None

    def refresh_cost(self):
        return 5

    def share_refreshes(self, staleness, costs, stage):
        self.told = staleness, costs, stage


def engine(stage, replica=0, optimizer=None, micro_batches=1):
    grid = SimpleNamespace(get_data_parallel_id=lambda: replica, get_stage_id=lambda: stage)
    return SimpleNamespace(
        stage_id=stage, num_stages=3, micro_batches=micro_batches, grid=grid, basic_optimizer=optimizer or Sharing(), module=None
    )


def test_one_replica_of_a_stage_gives_its_cost():
    assert shared_refreshes.own_cost(engine(1)) == {"refresh cost of stage 1": 5}
    assert shared_refreshes.own_cost(engine(1, replica=1)) == {}


@pytest.mark.parametrize("micro_batches, staleness", [(1, [2, 1, 0]), (4, [0.5, 0.25, 0])])
def test_the_optimizer_learns_every_stage_s_cost_and_staleness_in_updates(micro_batches, staleness):
    one = engine(1, micro_batches=micro_batches)
    shared_refreshes.share(one, {"refresh cost of stage 0": 7, "refresh cost of stage 1": 5})  # stage 2 has none
    assert one.basic_optimizer.told == (staleness, [7, 5, 0], 1)


def test_an_optimizer_that_shares_nothing_is_left_alone():
    other = engine(0, optimizer=torch.optim.SGD([torch.zeros(1)]))
    assert shared_refreshes.own_cost(other) == {}
    shared_refreshes.share(other, {})
