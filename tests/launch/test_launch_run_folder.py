"""A run's folder: what is refused, what a resume keeps of metrics.csv, and what is there at the end."""

import json

import pytest
from run_folder import FIELDS, RunFolder, read_metrics

MODEL = {"layers": 8, "width": 64}


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "first")


def write_updates(metrics, updates, loss=5.0):
    for update in updates:
        held_out = loss + 1 if update % 3 == 0 else None
        metrics.write(update=update, loss=loss / update, held_out_loss=held_out, lr=1e-3, updates_per_s=9.5, tokens=512 * update)


def save_checkpoint(folder, update):
    folder.checkpoints.mkdir(exist_ok=True)
    (folder.checkpoints / "latest").write_text(f"update_{update:06d}")


def test_a_row_is_on_disk_as_soon_as_it_is_written(folder):
    write_updates(folder.start(MODEL, 0), [1])
    assert folder.metrics.read_text().splitlines() == [",".join(FIELDS), "1,5.0,,0.001,9.5,512"]


def test_a_resume_drops_the_rows_after_the_checkpoint_and_a_torn_last_line(folder):
    write_updates(folder.start(MODEL, 0), range(1, 9))
    with folder.metrics.open("a") as file:
        file.write("9,0.5")
    write_updates(folder.start(MODEL, 6), [7, 8], loss=70.0)
    rows = read_metrics(folder.metrics)
    assert [row["update"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["loss"] for row in rows[5:]] == [5.0 / 6, 10.0, 8.75]
    assert [row["held_out_loss"] for row in rows[:3]] == [None, None, 6.0]


def test_a_new_run_never_goes_into_a_used_folder(folder):
    folder.check_unused()
    write_updates(folder.start(MODEL, 0), [1])
    with pytest.raises(ValueError, match="saved no checkpoint: give another --name"):
        folder.check_unused()
    save_checkpoint(folder, 1)
    with pytest.raises(ValueError, match="--resume, or give another --name"):
        folder.check_unused()


def test_a_resume_needs_a_checkpoint_of_the_same_model(folder):
    with pytest.raises(ValueError, match="nothing to resume in .*first"):
        folder.check_resumable(MODEL)
    folder.start(MODEL, 0)
    save_checkpoint(folder, 6)
    assert folder.check_resumable(MODEL) == 6
    with pytest.raises(ValueError, match="was trained with --width 64, not with --width 32"):
        folder.check_resumable({**MODEL, "width": 32})


def test_the_summary_averages_the_first_and_the_last_ten_updates(folder):
    metrics = folder.start(MODEL, 0)
    for update in range(1, 31):
        metrics.write(update=update, loss=float(update), held_out_loss=7.0 if update == 30 else None, lr=0.1, updates_per_s=1.0, tokens=1)
    folder.finish({"name": "first"}, "title")
    summary = json.loads(folder.summary.read_text())
    assert summary == {"updates": 30, "first_loss": 5.5, "last_loss": 25.5, "held_out_loss": 7.0, "name": "first"}
    assert folder.picture.read_bytes().startswith(b"\x89PNG")
