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


@pytest.mark.parametrize("arguments", [(), ("no-such-command",), ("timeline",), ("check",)])
def test_incomplete_commands_get_one_line(capsys, arguments):
    assert "--help" in refusal(capsys, *arguments)


def test_check_prints_what_the_configuration_activates(capsys, tmp_path):
    path = tmp_path / "ds.json"
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "BasisRotation", "params": {"lr": 1e-3}}}
    path.write_text(json.dumps(config))
    assert main(["check", str(path)]) == 0
    assert "BasisRotation" in capsys.readouterr().out


BY_CLIENT = "decided by the client"
TRAINING = [
    ({}, "ZeRO stage: 0; precision: fp32"),
    ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, "ZeRO stage: 1; precision: bf16"),
    ({"bfloat16": {"enabled": True}}, "ZeRO stage: 0; precision: bf16"),
    ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "ZeRO stage: 0; precision: fp32"),
    ({"bf16": {"enabled": "false"}}, "ZeRO stage: 0; precision: fp32"),
    ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, f"ZeRO stage: 0; precision: {BY_CLIENT}"),
    ({"zero_optimization": {"stage": "auto"}}, f"ZeRO stage: {BY_CLIENT}; precision: fp32"),
    ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}, "ZeRO stage: 2; precision: fp32"),
    ({"zero_optimization": "auto"}, f"ZeRO stage: {BY_CLIENT}; precision: fp32"),
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "ZeRO stage: 0; precision: fp32, torch_autocast"),
]


@pytest.mark.parametrize(("config", "line"), TRAINING, ids=lambda value: str(value)[:60])
def test_check_names_zero_stage_and_precision(capsys, tmp_path, config, line):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": {"type": "BasisRotation", "params": {"lr": 1e-3}}, **config}))
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[2] == line


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
