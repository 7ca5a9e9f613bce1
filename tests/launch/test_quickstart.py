"""quickstart.sh in an environment that is ready: the table, the files, a second run."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from run_folder import read_metrics

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def from_this_checkout():
    """quickstart.sh reuses an environment only where the package is installed from its own checkout."""
    import ds_basisrot

    return Path(ds_basisrot.__file__).is_relative_to(LAUNCH.parent)


@pytest.mark.skipif(not from_this_checkout(), reason="the package is not installed from this checkout")
def test_it_trains_and_prints_a_table_each_time_it_is_run(tmp_path):
    command = ["bash", LAUNCH / "quickstart.sh", "--updates", "14", "--layers", "4", "--width", "32", "--runs-dir", tmp_path / "runs"]
    env = {**os.environ, "VENV": sys.prefix, "DS_ACCELERATOR": "cpu"}
    for runs in (1, 2):
        done = subprocess.run(list(map(str, command)), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        for row in (
            "loss, first and last 10 updates",
            "held-out loss",
            "updates per second",
            "staleness per stage (microbatches)",
            "3 2 1 0",
        ):
            assert row in done.stdout
        folders = sorted((tmp_path / "runs").iterdir())
        assert len(folders) == runs
        for folder in folders:
            assert len(read_metrics(folder / "metrics.csv")) == 14 and (folder / "loss.png").exists()
            assert f"{folder}/loss.png" in done.stdout or folder != folders[-1]


@pytest.mark.skipif(not from_this_checkout(), reason="the package is not installed from this checkout")
def test_a_signal_stops_all_processes_after_a_checkpoint_and_the_run_goes_on_from_it(tmp_path):
    size = ["--layers", "4", "--width", "32", "--runs-dir", tmp_path / "runs", "--name", "stopped"]
    command = list(map(str, ["bash", LAUNCH / "quickstart.sh", *size]))
    env = {**os.environ, "VENV": sys.prefix, "DS_ACCELERATOR": "cpu"}
    metrics = tmp_path / "runs" / "stopped" / "metrics.csv"
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen([*command, "--updates", "100000"], cwd=tmp_path, env=env, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while not (metrics.exists() and len(read_metrics(metrics)) > 2):
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == 143
    said = (tmp_path / "log").read_text()
    update = int(re.search(r"stopped by a signal after update (\d+), which is saved; --name stopped --resume goes on", said)[1])
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
    resume = [*command, "--resume", "--updates", str(update + 2)]
    done = subprocess.run(resume, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["update"] for row in read_metrics(metrics)] == list(range(1, update + 3))


def test_help_installs_nothing(tmp_path):
    done = subprocess.run(
        ["bash", str(LAUNCH / "quickstart.sh"), "--help"],
        env={**os.environ, "VENV": str(tmp_path / "none")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "TORCH_SPEC" in done.stdout and not (tmp_path / "none").exists()
