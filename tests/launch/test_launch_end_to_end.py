"""Whole jobs under both launchers: training, resuming, and what becomes of a job when a worker dies or a JSON is refused."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from run_folder import read_metrics

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SCRIPT = LAUNCH / "pretrain_gpt.py"
SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--eval-batches", "2"]


def launch(cwd, *script_and_flags, launcher="deepspeed"):
    """Run a script in two processes; returns the finished launcher process, its output, and the seconds it took."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = {
        "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_addr", "127.0.0.1", "--master_port", port],
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", port],
    }[launcher]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(LAUNCH)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *start, *map(str, script_and_flags)],
        cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    return done, time.monotonic() - started


def small_config(folder, name="basis_rotation"):
    ds_config = json.loads((LAUNCH / "ds_config" / f"{name}.json").read_text())
    ds_config.update(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
    path = folder / "small config.json"
    path.write_text(json.dumps(ds_config))
    return path


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path)


@pytest.mark.parametrize("name, staleness", [("basis_rotation", [1, 0]), ("synchronous", [0, 0]), ("zero1_bf16", [1, 0])])
def test_a_resumed_job_goes_on_exactly_as_if_it_had_never_stopped(tmp_path, name, staleness):
    config = small_config(tmp_path, name)
    flags = [SCRIPT, "--ds-config", config, "--name", "first", "--updates", 10, "--save-interval", 6, "--eval-interval", 4, *SMALL]
    done, _ = launch(tmp_path, *flags)
    assert done.returncode == 0, done.stdout
    run = tmp_path / "runs" / "first"
    whole = read_metrics(run / "metrics.csv")
    assert [row["update"] for row in whole] == list(range(1, 11))
    assert [row["update"] for row in whole if row["held_out_loss"] is not None] == [4, 8, 10]
    assert whole[-1]["tokens"] == 10 * 2 * 2 * 32

    (run / "checkpoints" / "latest").write_text("update_000006")  # as if the job had been killed before its last checkpoint
    done, _ = launch(tmp_path, *flags, "--resume", launcher="torchrun")
    assert done.returncode == 0, done.stdout
    resumed = read_metrics(run / "metrics.csv")
    for field in ("update", "loss", "held_out_loss", "lr", "tokens"):
        assert [row[field] for row in resumed] == [row[field] for row in whole], field

    summary = json.loads((run / "summary.json").read_text())
    assert summary["updates"] == 10
    assert summary["held_out_loss"] == whole[-1]["held_out_loss"]
    assert summary["staleness_microbatches"] == staleness
    assert summary["model"] == {"layers": 2, "width": 32, "heads": 2, "context": 32, "stages": 2, "seed": 0, "parameters": 43136}
    assert len(summary["data"]["sha256"]) == 64
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "runs/first/loss.png" in done.stdout


def test_a_dying_worker_ends_the_job_with_its_error_shown(tmp_path, config):
    script = tmp_path / "one_rank_fails.py"
    script.write_text(
        textwrap.dedent("""
            import itertools
            import gpt_model
            import pretrain_gpt

            count, loss = itertools.count(), gpt_model.next_byte_loss

            def fails_in_the_third_update(logits, labels):  # only the last stage, here rank 1, computes a loss
                if next(count) == 2 * 2:
                    raise RuntimeError("worker 1 has had enough")
                return loss(logits, labels)

            gpt_model.next_byte_loss = fails_in_the_third_update
            pretrain_gpt.main()
        """)
    )
    done, seconds = launch(tmp_path, script, "--ds-config", config, "--updates", 1000, *SMALL)
    assert done.returncode != 0
    assert seconds < 60
    assert "rank 1 failed" in done.stdout
    assert "RuntimeError: worker 1 has had enough" in done.stdout
    assert len(read_metrics(tmp_path / "runs" / "gpt" / "metrics.csv")) == 2


def test_a_json_that_is_refused_is_one_line(tmp_path, config):
    config.write_text(json.dumps({**json.loads(config.read_text()), "zero_optimization": {"stage": 2}}))
    done, _ = launch(tmp_path, SCRIPT, "--ds-config", config, *SMALL)
    assert done.returncode == 2, done.stdout
    assert done.stdout.count(f"error: --ds-config {config}: zero_optimization.stage: DeepSpeed's pipelines run with stages") == 1
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "runs").exists()
