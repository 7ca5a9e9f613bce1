"""Megatron-LM's unmodified pretrain_gpt.py with the patches: no stage waits for another in a step, and all stop after the same one.

MEGATRON_PATH: a checkout of Megatron-LM core_v0.16.1; MEGATRON_PYTHON: the Python that has what its scripts import (default: this one).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MEGATRON = os.environ.get("MEGATRON_PATH")
PYTHON = os.environ.get("MEGATRON_PYTHON", sys.executable)

pytestmark = [pytest.mark.full, pytest.mark.skipif(not MEGATRON, reason="MEGATRON_PATH names no checkout of Megatron-LM")]

MODEL = """--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,5,5 --num-workers 0 --num-layers 4 --hidden-size 32
    --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
    --min-lr 1e-4 --lr-warmup-iters 2 --log-interval 1 --eval-iters 0 --eval-interval 1000000 --rerun-mode disabled --bf16
    --pipeline-model-parallel-size 2 --ckpt-format torch_dist --save-interval 1000000""".split()

# What a CPU needs of Megatron.
CPU = """--transformer-impl local --distributed-backend gloo --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-rope-fusion""".split()


def start(folder, processes, script, *arguments):
    """The job, with what it says in folder/said."""
    (folder / "basisrot.json").write_text(json.dumps({"pipeline": {"schedule": "async_1f1b"}}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_addr=127.0.0.1", f"--master_port={port}"]
    patched = ["-m", "cpu_cuda_shim", "-m", "megatron_patches", "--basisrot-config", folder / "basisrot.json"]
    command = [PYTHON, *launcher, *patched, *script, *MODEL, *CPU, "--data-cache-path", folder / "cache", *arguments]
    path = os.pathsep.join([str(HERE.parent), str(MEGATRON)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": path}
    with (folder / "said").open("w") as said:
        return subprocess.Popen(list(map(str, command)), cwd=MEGATRON, env=environment, stdout=said, stderr=subprocess.STDOUT)


def wait(job, folder, code=0):
    """What was said, after the job has ended."""
    try:
        ended = job.wait(timeout=280)
    finally:
        job.kill()
    said = (folder / "said").read_text()
    assert (ended == 0) == (code == 0), said[-6000:]
    return said


def wait_for_step(job, folder, step):
    end = time.monotonic() + 200
    while f"iteration {step:8d}/" not in (folder / "said").read_text():
        assert job.poll() is None and time.monotonic() < end, (folder / "said").read_text()[-6000:]
        time.sleep(0.2)


def ranks_of(job, number):
    """The process ids of the job's ranks."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    ranks = [pid for pid in children if "cpu_cuda_shim" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(ranks) == number
    return [int(pid) for pid in ranks]


@pytest.mark.parametrize("options", [[], ["--use-distributed-optimizer", "--overlap-grad-reduce", "--log-num-zeros-in-grad"]], ids=len)
def test_no_collective_of_a_step_spans_stages(tmp_path, options):
    script = [HERE / "recorded_script.py", tmp_path, "pretrain_gpt.py"]
    wait(start(tmp_path, 4, script, "--train-iters", "6", "--timing-log-level", "2", *options), tmp_path)
    for path in sorted(tmp_path.glob("rank_*.json")):
        noted = json.loads(path.read_text())
        assert noted["calls"]
        assert all(set(ranks) <= set(noted["stage"]) for _, ranks in noted["calls"]), [c for c in noted["calls"] if len(c[1]) > 2]
    assert len(list(tmp_path.glob("rank_*.json"))) == 4


@pytest.mark.parametrize("rank", [0, 3])
def test_a_signal_to_one_rank_stops_all_after_one_step_with_a_checkpoint(tmp_path, rank):
    folder = tmp_path / "checkpoints"
    job = start(tmp_path, 4, ["pretrain_gpt.py"], "--train-iters", "100000", "--exit-signal-handler", "--save", folder)
    wait_for_step(job, tmp_path, 5)
    os.kill(ranks_of(job, 4)[rank], signal.SIGTERM)
    said = wait(job, tmp_path)
    assert "exiting program after receiving SIGTERM" in said
    step = int((folder / "latest_checkpointed_iteration.txt").read_text())
    assert 5 <= step < 100000 and f"iteration {step:8d}/" in said and f"iteration {step + 1:8d}/" not in said


def test_the_largest_duration_stops_all_after_one_step_with_a_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    job = start(tmp_path, 4, ["pretrain_gpt.py"], "--train-iters", "100000", "--exit-duration-in-mins", "1", "--save", folder)
    said = wait(job, tmp_path)
    assert "exiting program after" in said
    step = int((folder / "latest_checkpointed_iteration.txt").read_text())
    assert f"iteration {step:8d}/" in said and f"iteration {step + 1:8d}/" not in said


def test_a_lost_rank_ends_the_job_and_is_named(tmp_path):
    job = start(tmp_path, 2, ["pretrain_gpt.py"], "--train-iters", "100000")
    wait_for_step(job, tmp_path, 5)
    os.kill(ranks_of(job, 2)[0], signal.SIGKILL)
    said = wait(job, tmp_path, code=1)
    assert "stage 1 lost its connection to stage 0 (rank 0)" in said or "SIGKILL" in said or "Signal 9" in said
