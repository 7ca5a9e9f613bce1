"""`ds-basisrot`: what its subcommands print, and one line and exit code 2 for wrong input."""

import json

import pytest
from cli_refusal import refusal

from ds_basisrot import __version__
from ds_basisrot.cli import main


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert (exit_info.value.code, capsys.readouterr().out) == (0, f"ds-basisrot {__version__}\n")


def test_timeline_shows_one_row_per_stage_and_the_staleness_of_each(capsys):
    assert main(["timeline", "--stages", "4", "--gas", "2", "--calls", "3"]) == 0
    schedule, table = capsys.readouterr().out.split("\n\n")
    rows = [line for line in schedule.splitlines() if line.startswith("stage")]
    assert [row.split()[1].rstrip("|") for row in rows] == ["0", "1", "2", "3"]
    assert all("B5*" in row and "B6" not in row for row in rows)
    assert [line.split() for line in table.splitlines()[1:]] == [["0", "3", "1.5"], ["1", "2", "1"], ["2", "1", "0.5"], ["3", "0", "0"]]


@pytest.mark.parametrize("option", ["--stages", "--gas", "--calls"])
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_timeline_names_the_option_that_is_no_count(capsys, option, value):
    line = refusal(capsys, "timeline", "--stages", "2", f"{option}={value}")
    assert f"argument {option}: must be a whole number of at least 1, not {value!r}" in line


@pytest.mark.parametrize("arguments", [(), ("no-such-command",), ("timeline",), ("check",)])
def test_incomplete_commands_get_one_line(capsys, arguments):
    assert "--help" in refusal(capsys, *arguments)


def test_check_prints_what_the_configuration_activates(capsys, tmp_path):
    path = tmp_path / "ds.json"
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "BasisRotation", "params": {"lr": 1e-3}}}
    path.write_text(json.dumps(config))
    assert main(["check", str(path)]) == 0
    assert "BasisRotation" in capsys.readouterr().out


def test_check_names_what_a_client_has_to_fill_in(capsys, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": "auto", "optimizer": {"type": "BasisRotation", "params": {"lr": "auto"}}}))
    assert main(["check", str(path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("accelerate to fill in: train_batch_size, optimizer.params.lr")


def test_check_refuses_a_wrong_key_with_the_files_name(capsys, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": {"type": "BasisRotation", "params": {"lr": 1e-3, "geometri": "bilateral"}}}))
    line = refusal(capsys, "check", path)
    assert str(path) in line and "geometri" in line and "geometry" in line


BAD_FILES = {
    "not JSON": (b"{", "is not valid JSON"),
    "not text": (b"\xff\xfe\x00", "is not valid JSON"),
    "no object": (b"[]", "must hold a JSON object"),
    "a key twice": (b'{"pipeline": {"stages": 1, "stages": 2}}', "'stages' appears twice"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_check_refuses_a_file_that_is_no_configuration(capsys, tmp_path, kind):
    content, expected = BAD_FILES[kind]
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    line = refusal(capsys, "check", path)
    assert str(path) in line and expected in line


def test_check_refuses_a_missing_file(capsys, tmp_path):
    assert "No such file" in refusal(capsys, "check", tmp_path / "missing.json")
    assert "Is a directory" in refusal(capsys, "check", tmp_path)
