"""A stage's file in a checkpoint: what is read is what was written, or the file is refused by its name."""

import json

import pytest
import torch
from safetensors.torch import save_file

from ds_basisrot.common.blocks import ConfigError
from ds_basisrot.deepspeed_plugin import stage_file

TENSORS = {
    "bytes": torch.arange(7, dtype=torch.uint8),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False]),
    "half": torch.randn(2, 3).bfloat16(),
    "number": torch.tensor(2.5),
    "turned": torch.arange(6.0).view(2, 3).T.contiguous(),
}
NAME = "async_pipeline-stage_000-replica_000.safetensors"
ABOUT = {"name": NAME, "stages": 2, "read_ahead": [[1, None]]}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / NAME
    stage_file.write(str(path), ABOUT, TENSORS)
    return path


def test_what_is_read_is_what_was_written(path):
    about, tensors = stage_file.read(str(path))
    assert about == {"format": 2, **ABOUT} and tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) and tensors[name].dtype == TENSORS[name].dtype for name in TENSORS)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_any_flipped_bit_and_any_length_is_refused(path):
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        _refused(path)
    for length in range(0, len(content), 9):
        path.write_bytes(content[:length])
        _refused(path)


def _refused(path):
    """Padding between the parts of a file is not covered, and says nothing."""
    try:
        about, tensors = stage_file.read(str(path))
    except ConfigError as error:
        assert str(path) in str(error)
    else:
        assert about == {"format": 2, **ABOUT} and all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_the_file_of_another_stage_is_refused(path):
    other = path.with_name(NAME.replace("stage_000", "stage_001"))
    path.rename(other)
    with pytest.raises(ConfigError, match=f"stage_001-replica_000.safetensors was written as {NAME}"):
        stage_file.read(str(other))


def test_a_later_format_is_refused(path, monkeypatch):
    monkeypatch.setattr(stage_file, "FORMAT", 3)
    stage_file.write(str(path), ABOUT, TENSORS)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="format 3 is newer than this ds_basisrot reads .2.; update it"):
        stage_file.read(str(path))


def test_a_file_of_the_first_format_is_read(path):
    text = json.dumps({"format": 1, **ABOUT})
    save_file(TENSORS, path, metadata={stage_file.ABOUT: text})
    assert stage_file.read(str(path))[0] == {"format": 1, **ABOUT}
    save_file(TENSORS, path, metadata={stage_file.ABOUT: text.replace("1", "2", 1)})
    with pytest.raises(ConfigError, match="SHA-256 differs"):
        stage_file.read(str(path))
