"""`ds-basisrot plan --stages`: layers are cut as DeepSpeed cuts them, and versions are counted in bytes."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from cli_refusal import refusal
from torch import nn

from ds_basisrot.cli import main
from ds_basisrot.cli.layer_list import LayerList, layers_of
from ds_basisrot.cli.stage_plan import stage_plan

MODEL = """
from torch import nn


class Wide(nn.Linear):
    pass


def layers(width=8, blocks=6, wide=40):
    return [nn.Embedding(20, width), *(nn.Linear(width, width) for _ in range(blocks)), lambda x: x, Wide(width, wide)]


def sequential(**sizes):
    return nn.Sequential(*(layer for layer in layers(**sizes) if isinstance(layer, nn.Module)))


def specs(width=8, blocks=4):
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    def embedding():
        return TiedLayerSpec("embedding", nn.Embedding, 20, width, tied_weight_attr="weight")

    return [embedding(), *(LayerSpec(nn.Linear, width, width) for _ in range(blocks)), embedding()]


def frozen():
    model = sequential()
    model[1].requires_grad_(False)
    return model


def module():
    return nn.TransformerEncoderLayer(8, 2)


def numbers():
    return [nn.Linear(8, 8), 7]
"""
SQUARE = 8 * 8 + 8


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "staged_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "staged_model", raising=False)
    return tmp_path


def configuration(folder, **changes):
    blocks = {"optimizer": {"type": "BasisRotation"}, "pipeline": {"schedule": "async_1f1b"}, "gradient_accumulation_steps": 1}
    config = {key: value for key, value in {**blocks, **changes}.items() if value is not None}
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return str(path)


def figures(folder, *arguments, model="layers", stages=3, **changes):
    path = folder / "figures.json"
    command = ["plan", configuration(folder, **changes), "--model", f"staged_model:{model}", "--stages", str(stages)]
    assert main([*command, *arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def of_stages(figures, key):
    return [each[key] for each in figures["stages"]["by_stage"]]


def test_stages_stash_their_versions_of_their_own_weights(folder):
    plan = figures(folder, "--partition", "uniform")
    assert of_stages(plan, "layers") == [[0, 3], [3, 6], [6, 9]]
    weights = [4 * (20 * 8 + 2 * SQUARE), 4 * 3 * SQUARE, 4 * (SQUARE + 8 * 40 + 40)]
    assert of_stages(plan, "weight_bytes") == weights
    assert of_stages(plan, "versions") == [3, 2, 0]
    assert of_stages(plan, "stash_bytes") == [3 * weights[0], 2 * weights[1], 0]
    assert plan["stages"]["weight_bytes"] == sum(weights)
    assert plan["stages"]["stash_bytes"] == 3 * weights[0] + 2 * weights[1]
    assert plan["totals"]["rotated_parameters"] > 0


def test_microbatches_per_update_share_versions(folder):
    assert of_stages(figures(folder, stages=6, gradient_accumulation_steps=2), "versions") == [4, 3, 3, 2, 2, 0]


def test_weights_in_16_bits_take_half(folder):
    assert figures(folder)["stages"]["stash_bytes"] == 2 * figures(folder, bf16={"enabled": True})["stages"]["stash_bytes"]


def test_without_stashing_there_are_no_versions(folder):
    plan = figures(folder, pipeline={"schedule": "async_1f1b", "weight_stashing": False})
    assert of_stages(plan, "versions") == [0, 0, 0] and plan["stages"]["stash_bytes"] == 0


def test_frozen_weights_are_not_stashed(folder):
    whole, frozen = (figures(folder, "--partition", "uniform", model=model) for model in ("sequential", "frozen"))
    assert of_stages(whole, "weight_bytes")[0] - of_stages(frozen, "weight_bytes")[0] == 4 * SQUARE


def test_any_optimizer_has_a_stash(folder):
    plan = figures(folder, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    assert "totals" not in plan
    assert plan["stages"] == figures(folder)["stages"]


def test_a_tied_layer_counts_once_on_each_stage_that_has_it(folder):
    specs = {"model": "specs", "stages": 2}
    apart, together = figures(folder, "--partition", "uniform", **specs), figures(folder, **{**specs, "stages": 1})
    assert of_stages(apart, "weight_bytes") == [4 * (160 + 2 * SQUARE)] * 2
    assert of_stages(together, "weight_bytes") == [4 * (160 + 4 * SQUARE)]


def test_names_are_those_of_a_pipeline_module():
    model = LayerList([nn.Linear(2, 2), torch.relu, nn.Linear(2, 3)])
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [layer.type_name for layer in layers_of(model)] == ["Linear", "relu", "Linear"]


def deepspeeds_cut(layers, stages, method):
    """The bounds that PipelineModule itself finds, without the processes it needs to be built."""
    from deepspeed.pipe import PipelineModule

    module = PipelineModule.__new__(PipelineModule)
    here = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=0))
    module.__dict__.update(num_stages=stages, global_rank=1, _topo=here, _layer_specs=layers)
    module._partition_layers(method)
    return [int(bound) for bound in module.parts]


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:linear", "type:^(Linear|Norm)$", "Parameters", "TYPE:Embed"])
@pytest.mark.parametrize("stages", [1, 3, 5])
def test_layers_are_cut_as_deepspeed_cuts_them(method, stages):
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    ends = [TiedLayerSpec("ends", nn.Embedding, 50, 8) for _ in range(2)]
    blocks = [LayerSpec(nn.Linear, 8, 8 * size) if size % 2 else nn.Linear(8, 8 * size) for size in (1, 4, 2, 3, 9, 5)]
    layers = [ends[0], *blocks, torch.relu, nn.LayerNorm(8), ends[1]]
    plan = stage_plan(LayerList(layers).layers, {}, stages, 1, method)
    bounds = [0, *(each["layers"][1] for each in plan["by_stage"])]
    assert bounds == deepspeeds_cut(layers, stages, method)


def test_the_table_names_stages_totals_and_what_the_file_leaves_open(capsys, folder):
    command = ["--model", "staged_model:layers", "--stages", "3"]
    assert main(["plan", configuration(folder), *command]) == 0
    output = capsys.readouterr().out
    assert "3 stages cut by parameters" in output and "together: weights" in output and "microbatches per update: 1" in output
    assert "not in the file" not in output and "flushes" not in output
    assert main(["plan", configuration(folder, pipeline=None, gradient_accumulation_steps=None), *command]) == 0
    output = capsys.readouterr().out
    assert "gradient_accumulation_steps is not in the file: taken as 1" in output
    assert 'pipeline.schedule is not "async_1f1b"' in output


def test_json_on_stdout_comes_alone(capsys, folder):
    assert main(["plan", configuration(folder), "--model", "staged_model:specs", "--stages", "2", "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["stages"]["by_stage"]) == 2


WRONG = {
    ("module", "--stages", "2"): "--stages: needs a sequence of layers, but staged_model:module returns a TransformerEncoderLayer",
    ("layers", "--stages", "10"): "--stages: 9 layers are too few for 10 stages",
    ("layers", "--stages", "0"): "argument --stages: must be a whole number of at least 1",
    ("layers", "--stages", "2", "--partition", "profile"): "--partition: must be uniform, parameters or type:REGEX, got 'profile'",
    ("layers", "--stages", "2", "--partition", "type:"): "--partition: must be uniform, parameters or type:REGEX, got 'type:'",
    ("layers", "--stages", "2", "--partition", "type:Block"): "'block' is in no layer's type; they are Embedding, Linear, <lambda>, Wide",
    ("layers", "--stages", "2", "--partition", "type:("): "--partition: '(' is no regular expression",
    ("layers", "--partition", "uniform"): "--partition: cuts the model into pipeline stages; give their number with --stages",
    ("layers", "--stages", "2", "--ranks", "2"): "--ranks: takes the model for what one pipeline stage holds",
    ("numbers", "--stages", "2"): "layer 1 is no module, LayerSpec or function, but of type int",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_input_gets_one_line(capsys, folder, arguments):
    model, *rest = arguments
    assert WRONG[arguments] in refusal(capsys, "plan", configuration(folder), "--model", f"staged_model:{model}", *rest)


@pytest.mark.parametrize("value", [0, 1.5, True, "2"])
def test_a_wrong_accumulation_names_file_and_key(capsys, folder, value):
    path = configuration(folder, gradient_accumulation_steps=value)
    line = refusal(capsys, "plan", path, "--model", "staged_model:layers", "--stages", "2", "--json", folder / "figures.json")
    assert "ds.json: gradient_accumulation_steps: must be a whole number of at least 1" in line


def test_without_deepspeed_a_line_says_what_to_install(capsys, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed.runtime", None)
    line = refusal(capsys, "plan", configuration(folder, optimizer={"type": "SGD"}), "--model", "staged_model:layers", "--stages", "2")
    assert 'install the extra "deepspeed"' in line
