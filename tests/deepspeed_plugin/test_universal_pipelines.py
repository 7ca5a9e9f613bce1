"""A pipeline's checkpoint that DeepSpeed's tool has converted is loaded, with all states, at other numbers of stages and replicas."""

import subprocess
import sys

import pytest
import torch
from processes import environment, run_cases
from safetensors.torch import load_file
from simulate import load

UPDATES, LAYERS = 5, 8
COMMON = {"gas": 2, "layers": LAYERS, "optimizer": "BasisRotation", "config": {"zero_optimization": {"stage": 1}}}
SAVED = {
    "name": "saved",
    "stages": 2,
    **COMMON,
    "script": [["new", "a", {}], *[["train", "a"]] * UPDATES, ["save"], ["train", "a"], ["save"]],
}
UNIVERSAL = {**COMMON, "config": {**COMMON["config"], "checkpoint": {"load_universal": True}}}
LOADED = [{"name": f"on-{stages}", "stages": stages, **UNIVERSAL, "script": [["load", "saved"], ["save"]]} for stages in (1, 2, 4)]
AGAIN = {"name": "again", "stages": 2, **UNIVERSAL, "script": [["load", "saved"]], "refused": True}
UNCONVERTED = {"name": "unconverted", "stages": 4, **COMMON, "script": [["load", "saved"]], "refused": True}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("universal")
    run_cases(4, [SAVED], out, "data_worker.py")
    folder = out / "saved" / "checkpoint" / f"global_step{UPDATES}"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += [
        "--input_folder",
        folder,
        "--output_folder",
        f"{folder}_universal",
        "--num_extract_workers",
        "1",
        "--num_merge_workers",
        "1",
    ]
    subprocess.run(command, env=environment(), capture_output=True, check=True, timeout=200)
    latest = out / "saved" / "checkpoint" / "latest"
    latest.write_text(folder.name)
    run_cases(4, LOADED, out, "data_worker.py")
    latest.write_text(f"global_step{UPDATES + 1}")  # as when a run has saved there since
    run_cases(4, [AGAIN, UNCONVERTED], out, "data_worker.py")
    return out


def rotations(out, name):
    """States of all matrices, by "<matrix>|<key>"."""
    files = (out / name / "checkpoint" / f"global_step{UPDATES}" / "basis_rotation").glob("*.safetensors")
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", [case["name"] for case in LOADED])
def test_weights_and_rotation_states_follow_to_other_stages(out, name):
    saved, loaded = rotations(out, "saved"), rotations(out, name)
    files = [torch.load(path) for path in sorted((out / "saved" / "checkpoint" / f"global_step{UPDATES}").glob("layer_*"))]
    weights = {f"{layer}.{key}": weight for layer, file in enumerate(files) for key, weight in file.items()}
    assert len(saved) >= 2 * LAYERS and saved.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in saved.items())
    for r in load(out, name):
        assert r["global_steps"] == UPDATES and all(torch.equal(w, weights[key]) for key, w in r["weights"].items())


def test_a_converted_checkpoint_that_was_overtaken_is_refused(out):
    for r in load(out, "again"):
        assert f"of update {UPDATES}, and " in r["message"] and "remove load_universal to go on" in r["message"]


def test_other_stages_are_refused_with_the_way_out(out):
    for r in load(out, "unconverted"):
        assert "saved with 2 stages, this run has 4" in r["message"] and "ds_to_universal" in r["message"]
