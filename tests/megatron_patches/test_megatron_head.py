"""A newer Megatron-LM's unmodified pretrain_gpt.py: the three ways to BasisRotation agree, and the no-flush schedule trains and resumes.

MEGATRON_HEAD_PATH: a checkout of Megatron-LM, core 0.18 or newer; MEGATRON_PYTHON: the Python that has what its scripts import (default:
this one). Of the other tests here, those of schedule and optimizer run with that core too, where PYTHONPATH names the checkout.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_megatron_scripts import CPU

HERE = Path(__file__).parent
MEGATRON = os.environ.get("MEGATRON_HEAD_PATH")
PYTHON = os.environ.get("MEGATRON_PYTHON", sys.executable)

pytestmark = [pytest.mark.full, pytest.mark.skipif(not MEGATRON, reason="MEGATRON_HEAD_PATH names no checkout of Megatron-LM")]

ROTATES = {"optimizer": {"type": "BasisRotation", "params": {"refresh_period": 2}}}
ASYNC = {"pipeline": {"schedule": "async_1f1b"}}
BY_NAME = ["--optimizer", "basis_rotation"]
BY_LAYERS = ["--use-distributed-optimizer", "--no-use-layer-wise-param-layout"]
STAGES = ["--pipeline-model-parallel-size", "2"]

MODEL = """--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,5,5 --num-workers 0 --num-layers 4 --hidden-size 32
    --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope --swiglu
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
    --min-lr 1e-4 --lr-warmup-iters 2 --log-interval 1 --eval-iters 1 --eval-interval 2 --rerun-mode disabled --bf16 --train-iters 4
    --ckpt-format torch_dist --save-interval 2""".split()


def run(folder, config, processes, *arguments, code=0):
    """What was said."""
    (folder / "basisrot.json").write_text(json.dumps(config))
    patched = ["-m", "cpu_cuda_shim", "-m", "megatron_patches", "--basisrot-config", folder / "basisrot.json", "pretrain_gpt.py"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [PYTHON, *launcher, *patched, *MODEL, *CPU, "--data-cache-path", folder / "cache", *arguments]
    path = os.pathsep.join([str(HERE.parent), str(MEGATRON)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": path}
    job = subprocess.run(list(map(str, command)), cwd=MEGATRON, env=environment, capture_output=True, text=True, timeout=280)
    said = job.stdout + job.stderr
    assert (job.returncode == 0) == (code == 0), said[-6000:]
    return said


def losses(said):
    """(step, loss) of all steps, in order; the second one after a start is Megatron's mean of two."""
    return [(int(step), float(loss)) for step, loss in re.findall(r"iteration +(\d+)/ +\d+ .*? lm loss: (\S+) ", said)]


def norms(said):
    """(step, gradient norm) of all steps, in order."""
    return [(int(step), float(norm)) for step, norm in re.findall(r"iteration +(\d+)/ +\d+ .*? grad norm: (\S+) ", said)]


def loss_at_end(said):
    """Of the test set."""
    return re.findall(r"on test set \| lm loss value: (\S+) ", said)


def near(found, expected):
    """Whether losses are the same but for the order in which sums are formed, and for whose Adam updates what is not rotated."""
    return [step for step, _ in found] == [step for step, _ in expected] and all(
        abs(a - b) < 1e-4 for (_, a), (_, b) in zip(found, expected)
    )


def same_end(said, resumed):
    """Whether a job that was resumed after its second step went on as if nothing had been."""
    return norms(resumed) == norms(said)[2:] and len(loss_at_end(said)) == 1 and loss_at_end(resumed) == loss_at_end(said)


@pytest.fixture(scope="module")
def replaced(tmp_path_factory):
    """Losses with BasisRotation in the place of Adam."""
    found = losses(run(tmp_path_factory.mktemp("replaced"), ROTATES, 2))
    assert [step for step, _ in found] == [1, 2, 3, 4] and found[-1][1] < found[0][1]
    return found


@pytest.mark.parametrize("options", [[], BY_LAYERS], ids=["on all replicas", "by layers"])
def test_the_registered_optimizer_is_the_same(tmp_path, replaced, options):
    said = run(tmp_path, ROTATES, 2, *BY_NAME, *options, "--save", tmp_path / "saved")
    assert near(losses(said), replaced) and "rotated: 16" in said
    resumed = run(tmp_path, ROTATES, 2, *BY_NAME, *options, "--load", tmp_path / "saved", "--ckpt-step", "2")
    assert same_end(said, resumed)


def test_the_registered_optimizer_beside_a_distributed_one(tmp_path, replaced):
    # No resuming: Megatron cannot load what its distributed optimizer saved of torch's Adam.
    assert near(losses(run(tmp_path, ROTATES, 2, *BY_NAME, "--use-distributed-optimizer", "--save", tmp_path / "saved")), replaced)


def test_the_distributed_optimizer_is_the_same(tmp_path, replaced):
    assert near(losses(run(tmp_path, ROTATES, 2, "--use-distributed-optimizer")), replaced)


def test_the_schedule_trains_evaluates_saves_and_resumes(tmp_path):
    said = run(tmp_path, ROTATES | ASYNC, 4, *STAGES, "--save", tmp_path / "saved")
    assert "pipeline schedule async_1f1b, 2 stages" in said and "validation loss at iteration 4 on test set" in said
    resumed = run(tmp_path, ROTATES | ASYNC, 4, *STAGES, "--load", tmp_path / "saved", "--ckpt-step", "2")
    assert losses(said)[-1][1] < losses(said)[0][1] and same_end(said, resumed)


def test_the_schedule_refuses_the_distribution_by_layers(tmp_path):
    said = run(tmp_path, ROTATES | ASYNC, 2, *STAGES, *BY_NAME, "--use-distributed-optimizer", code=1)
    assert "--use-distributed-optimizer: does not go with pipeline.schedule async_1f1b" in said


def test_the_name_is_unknown_without_the_block(tmp_path):
    said = run(tmp_path, ASYNC, 2, *STAGES, *BY_NAME, code=1)
    assert "invalid choice: 'basis_rotation'" in said
