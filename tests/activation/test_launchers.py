"""A training script that knows nothing of ds_basisrot gets BasisRotation from the JSON alone, under both launchers."""

import json
import os
import random
import sysconfig
from pathlib import Path

import pytest

TRAIN = """
import argparse, json, os, sys
import torch
import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no C++ build at start-up
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--result")
parser = deepspeed.add_config_arguments(parser)
options = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
engine, optimizer, _, _ = deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())
inputs = torch.randn(4, 6)
losses = []
for _ in range(12):
    loss = engine(inputs).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with open(options.result, "w") as file:
    json.dump({"optimizer": type(engine.optimizer).__name__, "losses": losses, "imports_us": "ds_basisrot" in globals()}, file)
sys.stdout.flush()
os._exit(0)  # DeepSpeed's own shutdown sometimes aborts after all work is done
"""
LAUNCHERS = {"deepspeed": ["--num_gpus", "1"], "torchrun": ["--nproc_per_node", "1"]}


def launch(environment, folder: Path, launcher: str, optimizer_type: str, through: list[str], **variables: str) -> dict:
    """Train with `launcher` and an optimizer named `optimizer_type`; what the script found out, once nothing was built meanwhile."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "ds.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": optimizer_type, "params": {"lr": 1e-2}}})
    )
    extensions = folder / "extensions"
    extensions.mkdir()
    program = Path(sysconfig.get_path("scripts")) / launcher
    port = str(random.randrange(20000, 40000))
    environment.run(
        *(program, *LAUNCHERS[launcher], "--master_port", port, *through, folder / "train.py"),
        *("--deepspeed", "--deepspeed_config", folder / "ds.json", "--result", folder / "result.json"),
        **{"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(extensions), **variables},
    )
    assert os.listdir(extensions) == []
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize(("launcher", "optimizer_type"), [("deepspeed", "basisrotation"), ("torchrun", "BasisRotation")])
def test_the_json_alone_selects_basis_rotation(installed, tmp_path, launcher, optimizer_type):
    result = launch(installed, tmp_path, launcher, optimizer_type, through=[])
    assert (result["optimizer"], result["imports_us"]) == ("BasisRotation", False)
    assert result["losses"][-1] < result["losses"][0]


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "through"), [("deepspeed", ["--module", "ds_basisrot.run"]), ("torchrun", ["-m", "ds_basisrot.run"])])
def test_the_explicit_route_does_the_same_where_the_autoload_is_off(installed, tmp_path, launcher, through):
    result = launch(installed, tmp_path, launcher, "BasisRotation", through, DS_BASISROT_AUTOLOAD="0")
    assert result["optimizer"] == "BasisRotation"
