"""quickstart.sh in an environment that is ready: the table, the files, a second run."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_help_installs_nothing(tmp_path):
    done = subprocess.run(
        ["bash", str(LAUNCH / "quickstart.sh"), "--help"],
        env={**os.environ, "VENV": str(tmp_path / "none")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "TORCH_SPEC" in done.stdout and not (tmp_path / "none").exists()
