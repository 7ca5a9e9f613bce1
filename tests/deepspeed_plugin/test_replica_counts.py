"""What all replicas of a stage must have in common is theirs also where a checkpoint was saved by fewer or more of them."""

from types import SimpleNamespace

import pytest
import torch

from ds_basisrot.common.blocks import ConfigError
from ds_basisrot.deepspeed_plugin import checkpoint
from ds_basisrot.pipeline.lagged_norms import LaggedNorms


class Tied:
    def state(self):
        return {"tied.weight.3.total": torch.ones(2)}

    def restore(self, names, get):
        self.restored = [name for name in names if name.startswith("tied.")]


class Feeds:
    def read_ahead(self):
        return []

    def restore(self, items):
        self.restored = items


def pipeline(replica, replicas):
    grid = SimpleNamespace(get_stage_id=lambda: 1, get_data_parallel_id=lambda: replica)
    engine = SimpleNamespace(
        grid=grid, device=torch.device("cpu"), num_stages=3, dp_world_size=replicas, module=SimpleNamespace(micro_offset=0),
        global_steps=0, micro_batches=2, load_universal_checkpoint=lambda: False,
    )  # fmt: skip
    norms = LaggedNorms(1, 3, "lagged_global", engine.device)
    return SimpleNamespace(engine=engine, norms=norms, tied=Tied(), feeds=Feeds(), trained=0, saves_read_ahead=True)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 1), (2, 2)])
def test_norms_ties_and_counters(tmp_path, saved_by, loaded_by):
    for replica in range(saved_by):
        saved = pipeline(replica, saved_by)
        saved.norms.known.copy_(torch.tensor([1.0, 2.0, 3.0]))
        saved.trained, saved.engine.module.micro_offset = 8, 5
        checkpoint.save(saved, tmp_path, "mark")
    for replica in range(loaded_by):
        loaded = pipeline(replica, loaded_by)
        before = torch.get_rng_state()
        torch.rand(3)
        checkpoint.load(loaded, str(tmp_path))
        assert loaded.norms.known.tolist() == [1.0, 2.0, 3.0]
        assert (loaded.trained, loaded.engine.module.micro_offset) == (8, 5)
        assert loaded.tied.restored == ["tied.weight.3.total"]
        assert torch.equal(torch.get_rng_state(), before) is (saved_by == loaded_by)


@pytest.mark.parametrize("tied", [False, True])
def test_a_node_that_has_only_the_files_of_its_own_replica(tmp_path, monkeypatch, tied):
    monkeypatch.setattr(Tied, "__bool__", lambda self: tied, raising=False)
    saved = pipeline(1, 2)
    saved.norms.known.copy_(torch.tensor([1.0, 2.0, 3.0]))
    checkpoint.save(saved, tmp_path / "tag", "mark")
    loaded = pipeline(1, 2)
    loaded.engine.async_pipeline = loaded
    if tied:
        with pytest.raises(ConfigError, match="stage_001-replica_000.safetensors is missing: copy the whole checkpoint"):
            checkpoint.check(loaded.engine, str(tmp_path), "tag")
        return
    checkpoint.check(loaded.engine, str(tmp_path), "tag")
    checkpoint.load(loaded, str(tmp_path / "tag"))
    assert loaded.norms.known.tolist() == [1.0, 2.0, 3.0]


def test_a_checkpoint_of_another_schedule_begins_anew(tmp_path):
    loaded = pipeline(1, 2)
    loaded.norms.known.fill_(7.0)
    checkpoint.load(loaded, str(tmp_path))
    assert loaded.norms.known.tolist() == [0.0, 0.0, 0.0] and loaded.tied.restored == []
