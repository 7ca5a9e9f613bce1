"""Checkpoints under ZeRO: resumed equals uninterrupted, other numbers of ranks, DeepSpeed's own tools, and files that are damaged."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes import environment, run_cases

SAVED_AFTER, STAGES = 13, (1, 2, 3)
SAVING = [{"name": f"saved-{stage}", "stage": stage, "save_after": SAVED_AFTER} for stage in STAGES] + [
    {"name": "saved-bf16", "stage": 1, "precision": "bf16", "save_after": SAVED_AFTER},
    {"name": "saved-by-adam", "stage": 1, "optimizer": "AdamW", "updates": SAVED_AFTER, "save_after": SAVED_AFTER},
    {"name": "saved-by-adam-without-zero", "stage": 0, "optimizer": "AdamW", "updates": SAVED_AFTER, "save_after": SAVED_AFTER},
]
RESUMED = [{"name": f"resumed-{stage}", "stage": stage, "load": f"saved-{stage}/checkpoint"} for stage in STAGES] + [
    {"name": "resumed-bf16", "stage": 1, "precision": "bf16", "load": "saved-bf16/checkpoint"},
    {"name": "resumed-1-as-2", "stage": 2, "load": "saved-1/checkpoint"},
    {"name": "resumed-from-adam", "stage": 1, "load": "saved-by-adam/checkpoint"},
    {"name": "resumed-from-adam-without-zero", "stage": 0, "load": "saved-by-adam-without-zero/checkpoint"},
    {"name": "resumed-by-adam", "stage": 1, "optimizer": "AdamW", "load": "saved-1/checkpoint"},
    {"name": "without-files", "stage": 1, "load": "without-files-of-1"},
    {"name": "with-stale-files", "stage": 1, "load": "stale-files-of-1"},
]
# DeepSpeed names the files of stage 3 otherwise, so that universal checkpoints do not go from one kind to the other.
UNIVERSAL = [
    {"name": f"universal-{saved}-as-{stage}", "stage": stage, "load": f"saved-{saved}/checkpoint", "load_universal": True}
    for saved, stage in ((1, 1), (1, 2), (3, 3))
]
UNCONVERTED = {"name": "unconverted", "stage": 1, "load": "saved-1/checkpoint", "refused": True}
# What is done to a checkpoint, or how else the one who loads it is configured -> words of the refusal.
DAMAGES = {
    "truncated": ["rank_00001.safetensors", "truncated"],
    "altered": ["rank_00001.safetensors", "altered"],
    "missing": ["rank_00001.safetensors", "missing"],
    "index-damaged": ["index.json", "damaged"],
    "of-another-update": ["update 12", "13"],
    "of-another-save": ["basis_rotation", "not what was saved"],
    "of-another-geometry": ["geometry"],
    "of-another-routing": ["blocks.0.up.weight", "rotate"],
}
OTHERWISE = {"of-another-geometry": {"geometry": "unilateral"}, "of-another-routing": {"rotate": {"exclude": ["blocks.0.up.weight"]}}}
DAMAGED = [
    {"name": f"refused-{damage}", "stage": 1, "load": f"damaged-{damage}", "refused": True, "params": OTHERWISE.get(damage, {})}
    for damage in DAMAGES
]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("checkpoints")
    run_cases(2, SAVING, out, "zero_worker.py")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(to_universal, [out / f"saved-{stage}" / "checkpoint" / f"global_step{SAVED_AFTER}" for stage in (1, 3)]))
    copy = shutil.copytree(out / "saved-1" / "checkpoint", out / "without-files-of-1")
    shutil.rmtree(copy / f"global_step{SAVED_AFTER}" / "basis_rotation")
    ours = out / "saved-1" / "checkpoint" / f"global_step{SAVED_AFTER}" / "basis_rotation"
    copy = shutil.copytree(out / "saved-by-adam" / "checkpoint", out / "stale-files-of-1")
    shutil.copytree(ours, copy / f"global_step{SAVED_AFTER}" / "basis_rotation")
    for damage in DAMAGES:
        copy = shutil.copytree(out / "saved-1" / "checkpoint", out / f"damaged-{damage}")
        spoil(copy / f"global_step{SAVED_AFTER}" / "basis_rotation", damage)
    run_cases(2, [*RESUMED, *UNIVERSAL, *DAMAGED], out, "zero_worker.py")
    for processes in (1, 4):
        (out / f"on-{processes}").mkdir()
        cases = [{**case, "name": f"on-{processes}/{case['name']}"} for case in (*UNIVERSAL, UNCONVERTED)]
        run_cases(processes, cases, out, "zero_worker.py")
    return out


def to_universal(folder):
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", folder]
    command += ["--output_folder", f"{folder}_universal", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run([*command, "--inject_missing_state"], env=environment(), capture_output=True, check=True, timeout=200)


def spoil(folder, damage):
    file, index = folder / "rank_00001.safetensors", folder / "index.json"
    about = json.loads(index.read_text())
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "altered":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        file.unlink()
    elif damage == "index-damaged":
        index.write_text(index.read_text()[:-100])
    elif damage == "of-another-update":
        index.write_text(json.dumps(about | {"global_steps": 12}))
    elif damage == "of-another-save":
        index.write_text(json.dumps(about | {"mark": "another"}))


def load(out, name, rank=0):
    return torch.load(out / name / f"rank_{rank}.pt")


def difference(one, other):
    return max((one["weights"][name] - other["weights"][name]).abs().max().item() for name in one["weights"])


def movement(run):
    return max((run["weights"][name] - run["before"][name]).abs().max().item() for name in run["weights"])


@pytest.mark.parametrize("kind", [*STAGES, "bf16"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(out, kind):
    for rank in range(2):
        whole, resumed = load(out, f"saved-{kind}", rank), load(out, f"resumed-{kind}", rank)
        assert resumed["losses"] == whole["losses"][SAVED_AFTER:]
        assert difference(whole, resumed) == 0.0


def test_stage_2_takes_over_from_stage_1_bitwise(out):
    assert difference(load(out, "saved-1"), load(out, "resumed-1-as-2")) == 0.0


@pytest.mark.parametrize("case", [case["name"] for case in UNIVERSAL])
def test_a_universal_checkpoint_goes_on_bitwise_on_as_many_ranks(out, case):
    assert difference(load(out, f"saved-{case[10]}"), load(out, case)) == 0.0


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("case", [case["name"] for case in UNIVERSAL])
def test_a_universal_checkpoint_goes_on_with_its_bases_on_fewer_and_on_more_ranks(out, case, processes):
    whole = load(out, f"saved-{case[10]}")
    assert difference(whole, load(out, f"on-{processes}/{case}")) <= 1e-2 * movement(whole)


@pytest.mark.parametrize("processes", [1, 4])
def test_another_number_of_ranks_is_refused_with_the_way_out(out, processes):
    message = load(out, f"on-{processes}/unconverted")["message"]
    assert "world size of 2" in message and "ds_to_universal, and load that with checkpoint.load_universal true" in message


@pytest.mark.parametrize("stage", STAGES)
def test_zero_to_fp32_finds_the_weights(out, stage):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(str(out / f"saved-{stage}" / "checkpoint"))
    resumed = load(out, f"resumed-{stage}")["before"]
    assert set(weights) == set(resumed)
    assert all(torch.equal(weights[name], resumed[name]) for name in resumed)


@pytest.mark.parametrize("name", ["resumed-from-adam", "resumed-from-adam-without-zero"])
def test_a_checkpoint_of_adam_goes_on_with_its_momentum(out, name):
    before, after = load(out, name.replace("resumed", "saved").replace("from", "by")), load(out, name)
    assert after["losses"][0] < before["losses"][-1] + 0.1
    assert after["losses"][-1] < before["losses"][-1] - 0.5


def test_adam_goes_on_from_our_checkpoint(out):
    before, after = load(out, "saved-1"), load(out, "resumed-by-adam")
    assert after["losses"][0] == pytest.approx(before["losses"][SAVED_AFTER], abs=1e-6)
    assert after["losses"][-1] < before["losses"][SAVED_AFTER - 1]


def test_without_our_files_bases_start_anew(out):
    whole, fresh = load(out, "saved-1"), load(out, "without-files")
    assert fresh["losses"][0] == whole["losses"][SAVED_AFTER]
    assert 0.0 < difference(whole, fresh) <= 0.5 * movement(whole)
    assert fresh["losses"][-1] < whole["losses"][SAVED_AFTER]


def test_files_that_another_run_left_behind_are_ignored(out):
    assert difference(load(out, "with-stale-files"), load(out, "resumed-from-adam")) == 0.0


@pytest.mark.parametrize("damage, words", DAMAGES.items())
def test_damaged_files_are_named_on_all_ranks(out, damage, words):
    for rank in range(2):
        message = load(out, f"refused-{damage}", rank)["message"]
        assert message is not None and "\n" not in message
        assert all(word in message for word in words), message
