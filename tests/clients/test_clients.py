"""Hugging Face's Trainer and accelerate train, save and resume with BasisRotation, of which their scripts know nothing but a ds_config."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
MISSING = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

BATCH = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
# "auto" stands wherever the client can fill in the value.
CLIENTS = {
    "trainer": SimpleNamespace(
        script="trainer_script.py",
        checkpoint="checkpoint-4",
        says=["optimizer: ShardedBasisRotation in DeepSpeedZeroOptimizer"],
        losses=r"'loss': '?([\d.]+)",
        ds_config={
            **BATCH,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "optimizer": {
                "type": "BasisRotation",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "refresh_period": 3},
            },
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": False},
        },
    ),
    "accelerate": SimpleNamespace(
        script="accelerate_script.py",
        checkpoint="state",
        says=["partitioned: True", "optimizer: ShardedBasisRotation in DeepSpeedZeroOptimizer_Stage3"],
        losses=r"update \d+: loss ([\d.]+)",
        ds_config={
            **BATCH,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "BasisRotation", "params": {"lr": "auto", "weight_decay": "auto", "refresh_period": 3}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
            },
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
    ),
}


def run(script, *arguments):
    """Run a script under torchrun on 2 processes; returns its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"]
    command += [f"--master_port={random.randrange(20000, 40000)}", str(HERE / "as_a_test.py"), str(HERE / script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert job.returncode == 0, f"exit code {job.returncode}:\n{job.stdout[-3000:]}\n{job.stderr[-6000:]}"
    return job.stdout + job.stderr


@pytest.fixture(scope="module", params=CLIENTS)
def client(request, tmp_path_factory):
    """A client after two runs: one from beginning to end, and one that resumes in the middle of it."""
    about = CLIENTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    ds_config = folder / "ds_config.json"
    ds_config.write_text(json.dumps(about.ds_config))
    whole, resumed, checkpoint = folder / "whole", folder / "resumed", folder / "whole" / about.checkpoint
    return SimpleNamespace(
        **vars(about),
        whole=whole,
        resumed=resumed,
        output=run(about.script, ds_config, whole),
        resumed_output=run(about.script, ds_config, resumed, checkpoint),
    )


def weights(folder):
    return load_file(folder / "last" / "model.safetensors")


def losses(client, output):
    return [float(loss) for loss in re.findall(client.losses, output)]


def test_the_json_alone_chooses_the_optimizer(client):
    for output in (client.output, client.resumed_output):
        assert set(client.says) <= set(output.splitlines())
        assert "[ds_basisrot] BasisRotation, rotated: " in output


def test_the_loss_falls(client):
    of_updates = losses(client, client.output)
    assert len(of_updates) == 8
    assert sum(of_updates[-3:]) < sum(of_updates[:3]) - 0.3


def test_a_resumed_run_is_bitwise_the_run_that_went_on(client):
    assert losses(client, client.resumed_output) == losses(client, client.output)[4:]
    uninterrupted, resumed = weights(client.whole), weights(client.resumed)
    assert uninterrupted.keys() == resumed.keys()
    different = [name for name in resumed if not torch.equal(resumed[name], uninterrupted[name])]
    assert not different
