"""A save that is killed, or fails, leaves what was there or the new checkpoint: at every call that changes files, and in real jobs."""

import itertools
import json
import os
import shutil

import pytest
import simulated_saves
import torch
from processes import HERE, run_cases, run_job
from simulated_saves import Job, TorchCheckpointEngine, leftovers

from ds_basisrot.deepspeed_plugin import checkpoint_folders, whole_checkpoints

# Of each rank: its place on its node, and its file system.
PLACES = {
    "one node": ([0, 1], ["disk", "disk"]),
    "two nodes that share a file system": ([0, 0], ["disk", "disk"]),
    "two nodes with disks of their own": ([0, 0], ["disk", "other disk"]),
}


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("tags", [("a", "a"), ("a", "b")], ids=["the same tag", "a new tag"])
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_anywhere_leaves_the_old_or_the_new_checkpoint_on_all_nodes(tmp_path, monkeypatch, place, tags, killed):
    local_ranks, disks = PLACES[place]
    came_through = set()
    for at in itertools.count():
        folders = [str(tmp_path / str(at) / disk) for disk in disks]
        job = Job(monkeypatch, local_ranks, folders)
        assert job.save(1, tags[0])
        survived = job.save(2, tags[1], killed, at)
        assert any(job.settle(killed, again) for again in range(20))  # a job that resumes may be killed too
        (tag, contents), other = job.load()
        assert other == (tag, contents), f"killed at {at}"
        assert contents in ({"update 1"}, {"update 2"}), f"killed at {at}"
        assert tags[0] == tags[1] or contents == {"update 1" if tag == "a" else "update 2"}
        came_through |= contents
        assert job.save(3, "a")
        assert job.load() == [("a", {"update 3"})] * 2
        assert not any(map(leftovers, folders)), f"killed at {at}"
        monkeypatch.undo()
        shutil.rmtree(tmp_path / str(at))
        if survived:
            break
    assert contents == {"update 2"} and at > (5 if killed == 0 or local_ranks[1] == 0 else 1)
    assert came_through >= {"update 2"} | ({"update 1"} if at > 0 else set())


def test_what_a_script_put_into_the_folder_of_a_tag_stays(tmp_path, monkeypatch):
    job = Job(monkeypatch, [0], [str(tmp_path)])
    (tmp_path / "a" / "loader").mkdir(parents=True)
    (tmp_path / "a" / "loader" / "position").write_text("17")
    (tmp_path / "a" / "rank_9_a_states.pt").write_text("of a run on more ranks")
    for update in (1, 2):
        assert job.save(update, "a")
        assert (tmp_path / "a" / "loader" / "position").read_text() == "17"
    assert sorted(os.listdir(tmp_path / "a")) == ["ds_basisrot.complete", "loader", "rank_0_a_states.pt", "rank_0_b_states.pt"]


def test_folders_of_others_that_are_called_alike_stay(tmp_path, monkeypatch):
    job = Job(monkeypatch, [0], [str(tmp_path)])
    for name in ("download.partial", "b.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    assert job.save(1, "a")
    assert sorted(leftovers(tmp_path)) == ["b.replaced", "download.partial"]


def test_the_old_checkpoint_comes_back_where_the_new_one_was_removed(tmp_path, monkeypatch):
    job = Job(monkeypatch, [0], [str(tmp_path)])
    assert job.save(1, "a")
    (tmp_path / "a").rename(tmp_path / "a.replaced")
    assert job.load("a") == [("a", {"update 1"})]
    assert not leftovers(tmp_path)


def test_a_job_that_loads_may_put_a_checkpoint_in_place_before_the_one_that_saves(tmp_path, monkeypatch):
    job = Job(monkeypatch, [0], [str(tmp_path)])
    assert job.save(1, "a")
    move_aside, put_in_place = checkpoint_folders.move_aside, checkpoint_folders.put_in_place

    def overtaken(folder):
        move_aside(folder)
        put_in_place(folder)

    monkeypatch.setattr(checkpoint_folders, "move_aside", overtaken)
    assert job.save(2, "a")
    assert job.load() == [("a", {"update 2"})]


def test_other_writers_of_deepspeed_write_in_place(tmp_path, monkeypatch):
    class FastCheckpointEngine(TorchCheckpointEngine):
        pass

    job = Job(monkeypatch, [0], [str(tmp_path)])
    said = []
    monkeypatch.setattr(whole_checkpoints, "log", said.append)
    monkeypatch.setattr(simulated_saves, "TorchCheckpointEngine", FastCheckpointEngine)
    assert job.save(1, "a")
    assert sorted(os.listdir(tmp_path / "a")) == ["rank_0_a_states.pt", "rank_0_b_states.pt"]
    assert said == ["save_checkpoint: FastCheckpointEngine writes in place, a killed save leaves an incomplete a"]


WRITES = ("save", "save_file", "copyfile")
SAVED = [["train"], ["save", "checkpoint", "a"], ["train"]]
FULL = [["save", "checkpoint", "b", None, [rank, "full", at, WRITES]] for rank, at in ((0, 1), (1, 1), (0, 2), (1, 2), (0, 4))]
REFUSED = {
    ("save", "checkpoint", "b.partial"): "tag 'b.partial' is no name of a checkpoint",
    ("save", "checkpoint", ""): "tag '.' is no name of a checkpoint",
    ("save", "checkpoint", "of {rank}"): "tag 'of 0' on rank 0, 'of 1' on rank 1: give all ranks the same",
    ("load", "checkpoint", "a.replaced"): "tag 'a.replaced' is no name of a checkpoint",
    ("save", "checkpoint", "a[1]"): "tag 'a[1]' has one of *?[",
    ("load", "checkpoint", "z"): "checkpoint/z: there is no such checkpoint",
}
LATER = [["save", "checkpoint", "b"], ["save", "checkpoint", "c", {"save_latest": False}], ["load", "checkpoint"]]
JOB = [
    {"name": "failing", "stage": 1, "steps": [*SAVED, *FULL, *REFUSED, ["load", "checkpoint"]]},
    {"name": "later", "stage": 1, "steps": [["load", "checkpoint"], ["train"], *LATER]},
    {"name": "plain", "stage": 0, "steps": [["train"], ["save", "plain", "a"], ["save", "plain", "a"], ["load", "plain"]]},
    {"name": "others", "stage": 0, "optimizer": "AdamW", "steps": [["train"], ["save", "others", "a"]]},
    # last, as the processes then are in folders of their own
    {
        "name": "nodes",
        "stage": 1,
        "nodes": True,
        "steps": [*SAVED, ["save", "checkpoint", "a"], ["save", "checkpoint", "b"], ["load", "checkpoint"]],
    },
]


def results(out, name):
    """Of each rank, what the steps of a case returned, and its weights in the end."""
    return [(each["results"], each["weights"]) for each in (torch.load(out / name / f"rank_{rank}.pt") for rank in range(2))]


def same(weights, others):
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    run_cases(2, JOB, out, "whole_worker.py")
    return out


def test_a_full_disk_of_one_rank_fails_the_save_on_all_ranks_and_leaves_what_was_there(out):
    for results_of_rank, _ in results(out, "failing"):
        failed = results_of_rank[len(SAVED) : len(SAVED) + len(FULL)]
        for message, (*_, (rank, *_)) in zip(failed, FULL):
            assert isinstance(message, str) and message.startswith(f"rank {rank} could not write "), message
            assert "No space left on device" in message
        path, global_steps, _ = results_of_rank[-1]
        assert path.endswith("checkpoint/a/mp_rank_00_model_states.pt") and global_steps == 1


def test_tags_that_no_checkpoint_can_have_are_refused_on_all_ranks(out):
    for results_of_rank, _ in results(out, "failing"):
        for message, words in zip(results_of_rank[len(SAVED) + len(FULL) : -1], REFUSED.values(), strict=True):
            assert words in message and "\n" not in message


def test_the_next_save_removes_what_a_failed_one_left(out):
    assert {"a", "b", "c", "latest", "zero_to_fp32.py"} <= set(os.listdir(out / "checkpoint"))
    assert not leftovers(out / "checkpoint")
    assert (out / "checkpoint" / "latest").read_text() == "b"
    for results_of_rank, weights in results(out, "later"):
        assert "checkpoint/b/" in results_of_rank[-1][0] and same(results_of_rank[-1][2], weights)


def test_it_holds_without_zero_and_not_for_other_optimizers(out):
    assert "ds_basisrot.complete" in os.listdir(out / "plain" / "a")
    assert not any("ds_basisrot" in name for name in os.listdir(out / "others" / "a"))


def test_nodes_with_disks_of_their_own_have_their_files_and_the_same_latest(out):
    for rank in range(2):
        folder = out / f"node_{rank}" / "checkpoint"
        assert (folder / "latest").read_text() == "b" and not leftovers(folder)
        assert {"mp_rank_00_model_states.pt", f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"} <= set(os.listdir(folder / "b"))
    for results_of_rank, weights in results(out, "nodes"):
        assert results_of_rank[-1][1] == 2 and same(results_of_rank[-1][2], weights)


# Of a save under the tag of the last one: where it is killed, and what is there then.
KILLS = {
    "half a file of DeepSpeed's": ([1, "kill", 1, ["save"]], {"a", "a.partial"}),
    "nothing under the tag": ([0, "kill", 3, ["rename"]], {"a.partial", "a.replaced"}),
}


def kill(out, name, stop):
    """A job that is killed in its second save; returns whether it was."""
    (out / name).mkdir()
    path = out / name / "cases.json"
    path.write_text(json.dumps([{"name": "killed", "stage": 1, "steps": [*SAVED, ["save", "checkpoint", "a", None, stop]]}]))
    return run_job(2, HERE / "whole_worker.py", path, out / name).returncode != 0


def check_loads(out, names):
    """That each of some killed jobs left a checkpoint, of the first update or of the second, and that the next save is as ever."""
    steps = [["load", "checkpoint"], ["save", "checkpoint", "after"], ["load", "checkpoint", "after"]]
    cases = [{"name": f"{name}/loaded", "stage": 1, "steps": [[s, f"{name}/{w}", *t] for s, w, *t in steps]} for name in names]
    undisturbed = [*SAVED, ["save", "checkpoint", "b"], ["load", "checkpoint", "a"], ["load", "checkpoint", "b"]]
    run_cases(2, [{"name": "undisturbed", "stage": 1, "steps": undisturbed}, *cases], out, "whole_worker.py")
    expected = {update: weights for _, update, weights in results(out, "undisturbed")[0][0][-2:]}
    for name in names:
        for (loaded, saved, again), _ in results(out, f"{name}/loaded"):
            assert saved is True and loaded[1] == again[1], name
            assert same(loaded[2], expected[loaded[1]]) and same(again[2], loaded[2]), name
        assert not leftovers(out / name / "checkpoint")


def test_a_job_that_is_killed_while_it_saves_goes_on_from_a_whole_checkpoint(tmp_path):
    for name, (stop, left) in KILLS.items():
        assert kill(tmp_path, name, stop)
        assert {entry for entry in os.listdir(tmp_path / name / "checkpoint") if entry.startswith("a")} == left
    check_loads(tmp_path, list(KILLS))


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_so_it_does_wherever_it_is_killed(tmp_path, rank):
    kills = list(itertools.takewhile(lambda at: kill(tmp_path, str(at), [rank, "kill", at]), itertools.count(1)))
    assert len(kills) > (10 if rank == 0 else 3)
    check_loads(tmp_path, [str(at) for at in kills])
