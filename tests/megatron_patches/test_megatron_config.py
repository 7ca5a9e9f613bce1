"""The file that chooses optimizer and schedule: what is read from it, and the one line that refuses what cannot be meant."""

import json
from types import MappingProxyType

import pytest

from ds_basisrot.common.blocks import ConfigError
from megatron_patches import config, yaml_text

ASYNC = {"schedule": "async_1f1b"}
ROTATE = {"type": "BasisRotation", "params": {"refresh_period": 7, "tp_mode": "exact"}}
YAML = """
optimizer:
  type: BasisRotation
  params: {refresh_period: 7, tp_mode: exact}
pipeline:
  schedule: async_1f1b
"""


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def refused(given):
    """The line that refuses a configuration."""
    with pytest.raises(ConfigError) as error:
        config.load(given)
    line = str(error.value)
    assert len(line.splitlines()) == 1
    return line


@pytest.mark.parametrize("name", ["basisrot.yaml", "basisrot.yml", "basisrot"])
def test_json_yaml_and_mapping_say_the_same(tmp_path, name):
    both = {"optimizer": ROTATE, "pipeline": ASYNC}
    files = [write(tmp_path, "basisrot.json", json.dumps(both)), write(tmp_path, name, YAML)]
    for each in (*files, str(files[0]), both, MappingProxyType(both)):
        settings = config.load(each)
        assert settings.optimizer == ROTATE["params"] and settings.pipeline.asynchronous
    assert config.load(files[0]).path == str(files[0])
    assert config.load(both).path == "the configuration"


def test_numbers_with_an_exponent_are_numbers(tmp_path):
    texts = ["2e-3", "2E-3", "+2e-3", ".2e-2", "2.e-3", "2.0e-3", "0.002"]
    for text in texts:
        path = write(tmp_path, "basisrot.yaml", f"optimizer: {{type: BasisRotation, params: {{lr: {text}, eps: 1e+0}}}}")
        assert config.load(path).optimizer == {"lr": 0.002, "eps": 1.0}, text
    path = write(tmp_path, "basisrot.yaml", 'pipeline: {schedule: async_1f1b, trace: "2e-3"}')
    assert config.load(path).pipeline.trace == "2e-3"


def test_a_yaml_merge_may_be_overruled():
    merged = yaml_text.parse("base: &base {a: 1, b: 2}\nown: &own {<<: *base, b: 3}\nthird: {<<: *own, a: 4}\n")
    assert merged["own"] == {"a": 1, "b": 3} and merged["third"]["a"] == 4
    assert yaml_text.parse("x: &x {a: 1}\ny: &y {b: 2}\nz:\n  <<: *x\n  <<: *y\n")["z"] == {"a": 1, "b": 2}
    assert yaml_text.parse("{1: a, '1': b}") == {1: "a", "1": "b"}


def test_each_block_is_enough():
    only_schedule = config.load({"pipeline": ASYNC, "optimizer": None})
    assert only_schedule.optimizer is None and only_schedule.pipeline.asynchronous
    only_optimizer = config.load({"optimizer": {"type": "basisrotation"}, "pipeline": {}})
    assert only_optimizer.optimizer == {} and not only_optimizer.pipeline.asynchronous
    assert config.load({"optimizer": {"type": "BasisRotation"}, "pipeline": {"schedule": "1f1b"}}).optimizer == {}


def test_options_of_the_schedule_are_read():
    options = config.load({"pipeline": {**ASYNC, "weight_stashing": False, "clip_scope": "stage"}}).pipeline
    assert (options.weight_stashing, options.clip_scope) == (False, "stage")


FILES = [
    ("basisrot.json", '{"pipeline": }', ["is not JSON", "line 1"]),
    ("basisrot.json", "", ["is not JSON"]),
    ("basisrot.json", "[]", ['"optimizer"', '"pipeline"']),
    ("basisrot.json", "null", ["must be an object"]),
    ("basisrot.yaml", "pipeline: [", ["is not YAML"]),
    ("basisrot.yaml", "pipeline:\n\tschedule: async_1f1b", ["is not YAML"]),
    ("basisrot.yaml", "", ["must be an object"]),
    ("basisrot.yaml", "- pipeline", ["must be an object"]),
    ("basisrot.yaml", "1: 2", ["unknown", "1"]),
    ("basisrot.json", '{"pipeline": {"schedule": "async_1f1b", "schedule": "1f1b"}}', ["'schedule' appears twice", "keep one"]),
    ("basisrot.yaml", "pipeline: {schedule: async_1f1b, schedule: 1f1b}", ["'schedule' appears twice", "keep one"]),
    ("basisrot.yaml", "pipeline: {schedule: async_1f1b}\npipeline: {}", ["line 2", "'pipeline' appears twice"]),
    ("basisrot.yaml", "optimizer: {params: {lr: 2026-13-45}}", ["is not YAML", "month"]),
    ("basisrot.yaml", "pipeline: !!bool maybe", ["is not YAML"]),
    ("basisrot.yaml", "[" * 3000, ["is not YAML"]),
    ("basisrot.json", "[" * 100_000, ["nested too deeply"]),
]


@pytest.mark.parametrize(("name", "text", "words"), FILES)
def test_a_file_that_is_none(tmp_path, name, text, words):
    path = write(tmp_path, name, text)
    line = refused(path)
    assert line.startswith(f"{path}: ") and all(word in line for word in words), line


def test_a_file_that_cannot_be_read(tmp_path):
    assert refused(tmp_path / "missing.json") == f"{tmp_path}/missing.json: cannot be read (No such file or directory)"
    assert refused(tmp_path) == f"{tmp_path}: cannot be read (Is a directory)"
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\x80\x81")
    assert refused(binary).startswith(f"{binary}: is not text")


BLOCKS = [
    ({}, ["chooses nothing", "BasisRotation", "async_1f1b"]),
    ({"pipeline": {"schedule": "1f1b"}}, ["chooses nothing"]),
    ({"optimizer": {}, "pipeline": None}, ["chooses nothing"]),
    ({"pipelin": ASYNC}, ["pipelin", "top level", "'pipeline'"]),
    ({"pipeline": ASYNC, "gradient_clipping": 1.0}, ["gradient_clipping"]),
    ({"pipeline": "async_1f1b"}, ["pipeline: must be an object"]),
    ({"optimizer": "BasisRotation"}, ["optimizer: must be an object"]),
    ({"pipeline": {"schedul": "async_1f1b"}}, ["schedul", "'schedule'"]),
    ({"pipeline": {**ASYNC, "weight_stash": True}}, ["weight_stash", "'weight_stashing'"]),
    ({"pipeline": {"schedule": "async-1f1b"}}, ["pipeline.schedule", "'async-1f1b'", "'async_1f1b'"]),
    ({"pipeline": {**ASYNC, "weight_stashing": 1}}, ["pipeline.weight_stashing", "true or false"]),
    ({"pipeline": {**ASYNC, "clip_scope": "global"}}, ["pipeline.clip_scope", "lagged_global"]),
    ({"pipeline": {"weight_stashing": False}}, ["pipeline.weight_stashing", "schedule"]),
    ({"pipeline": {**ASYNC, "lr_correction_updates": 10}}, ["pipeline.lr_correction_updates", "Megatron", "remove it"]),
    ({"pipeline": {**ASYNC, "delay_compensation": 0.1}}, ["pipeline.delay_compensation", "Megatron", "remove it"]),
    ({"pipeline": {**ASYNC, "weight_prediction": True}}, ["pipeline.weight_prediction", "Megatron", "remove it"]),
    ({"optimizer": {"type": "BasisRotatoin"}}, ["optimizer.type", "'BasisRotatoin'", "'BasisRotation'"]),
    ({"optimizer": {"type": "Adam"}}, ["optimizer.type", "'Adam'", "remove the block"]),
    ({"optimizer": {"params": {}}}, ["optimizer.type", "None"]),
    ({"optimizer": {"type": "BasisRotation", "parms": {}}}, ["parms", "'params'"]),
    ({"optimizer": {"type": "BasisRotation", "params": []}}, ["optimizer.params", "must be an object"]),
    ({"optimizer": {"type": "BasisRotation", "params": {"refresh_perod": 1}}}, ["refresh_perod", "'refresh_period'"]),
    ({"optimizer": {"type": "BasisRotation", "params": {"refresh_period": 0}}}, ["optimizer.params.refresh_period", "0"]),
    ({"optimizer": {"type": "BasisRotation", "params": {"refresh_period": "auto"}}}, ["optimizer.params.refresh_period", "auto"]),
    ({"optimizer": {"type": "BasisRotation", "params": {"tp_mode": "shards"}}}, ["optimizer.params.tp_mode", "blockwise", "'shards'"]),
]


@pytest.mark.parametrize(("blocks", "words"), BLOCKS, ids=lambda value: str(value)[:60])
def test_blocks_that_cannot_be_meant(blocks, words, tmp_path):
    line = refused(blocks)
    assert line.startswith("the configuration: ") and all(word in line for word in words), line
    path = write(tmp_path, "basisrot.json", json.dumps(blocks))
    assert refused(path) == line.replace("the configuration", str(path), 1)
