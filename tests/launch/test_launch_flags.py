"""Mistakes in the flags: one line that says what to change, exit code 2, and before torch is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}}}
FOUR = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}


def command(*flags):
    # an import of torch would fail: its name is taken by None
    code = f"import sys; sys.path.insert(0, {str(LAUNCH)!r}); sys.modules['torch'] = None; import pretrain_gpt; pretrain_gpt.main()"
    return [sys.executable, "-c", code, *map(str, flags)]


def environment(**extra):
    return {**{name: value for name, value in os.environ.items() if name not in FOUR}, **extra}


@pytest.fixture
def here(tmp_path):
    (tmp_path / "adamw.json").write_text(json.dumps(CONFIG))
    (tmp_path / "scheduled.json").write_text(json.dumps({**CONFIG, "scheduler": {"type": "WarmupLR"}}))
    (tmp_path / "broken.json").write_text('{"optimizer": ')
    (tmp_path / "nothing.json").write_text("{}")
    (tmp_path / "empty.txt").write_text("")
    used = tmp_path / "runs" / "used" / "checkpoints"
    used.mkdir(parents=True)
    (used / "latest").write_text("update_000006")
    (used.parent / "model.json").write_text(json.dumps({"layers": 8, "width": 64, "heads": 4, "context": 64, "stages": 4, "seed": 0}))
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stages", 12], "--stages 12 is more than --layers 8"),
        (["--stages", 3], "4 processes are not a multiple of --stages 3"),
        (["--width", 30], "--width 30 is not a multiple of --heads 4"),
        (["--layers", 0], "argument --layers: '0' is not a whole number of at least 1"),
        (["--lr", -1], "argument --lr"),
        (["--updates", 10, "--warmup", 10], "--warmup 10 leaves nothing of --updates 10"),
        (["--nmae", "x"], "unrecognized arguments: --nmae x"),
        (["--ds-config", "none.json"], "--ds-config none.json: No such file"),
        (["--ds-config", "broken.json"], "--ds-config broken.json is not JSON"),
        (["--ds-config", "nothing.json"], '--ds-config nothing.json has no "optimizer" block'),
        (["--ds-config", "scheduled.json", "--lr", 1e-3], '--lr: the "scheduler" block of scheduled.json'),
        (["--data", "none.txt"], "--data none.txt: No such file"),
        (["--data", "empty.txt"], "--data empty.txt: no text in it"),
        (["--data", "adamw.json", "--context", 300], "--context 300"),
        (["--resume", "--name", "new"], "nothing to resume in runs/new"),
        (["--name", "used"], "runs/used already holds a run: go on with it by --resume, or give another --name"),
        (["--name", "used", "--resume", "--width", 32], "trained with --width 64, not with --width 32"),
        (["--name", "used", "--resume", "--updates", 6], "has 6 updates already"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_without_torch(here, flags, message):
    flags = flags if "--ds-config" in flags else ["--ds-config", "adamw.json", *flags]
    done = subprocess.run(command(*flags), cwd=here, env=environment(**FOUR), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.startswith("pretrain_gpt.py: error: ")
    assert len(done.stderr.splitlines()) == 1


def test_without_a_launcher_it_says_how_to_start(here):
    done = subprocess.run(command("--ds-config", "adamw.json"), cwd=here, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "deepspeed --num_gpus N" in done.stderr


def test_the_other_processes_leave_the_word_to_the_first(here):
    env = environment(**{**FOUR, "RANK": "1", "LOCAL_RANK": "1"})
    with pytest.raises(subprocess.TimeoutExpired) as silent:
        subprocess.run(command("--stages", 12, "--ds-config", "adamw.json"), cwd=here, env=env, capture_output=True, timeout=2)
    assert not silent.value.stderr
