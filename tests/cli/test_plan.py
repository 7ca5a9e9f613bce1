"""`ds-basisrot plan`: its figures are the optimizer's, its errors are one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_refusal import refusal

from ds_basisrot import BasisRotation, param_groups
from ds_basisrot.bench.state_size import state_bytes
from ds_basisrot.cli import main
from ds_basisrot.cli.cost_plan import name_pattern

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Experts(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, width, 2 * width))


class Model(nn.Module):
    def __init__(self, width=8, layers=2, name="model"):
        super().__init__()
        if name != "model":
            print("building", name)
        self.embedding = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.experts = Experts(width)
        self.head = nn.Linear(width, 10)

    @classmethod
    def wide(cls, width):
        return cls(width=width)


def number():
    return 7


def reads_numbers():
    return nn.Linear(int(torch.ones(()).item()), 2)


def leaves():
    raise SystemExit("usage: none")


def vectors():
    return nn.LayerNorm(4)


constant = 7
"""

VARIANTS = {
    "second order, bilateral": {},
    "unilateral": {"geometry": "unilateral"},
    "auto": {"geometry": "auto"},
    "first order": {"source": "first_order"},
    "bfloat16 states": {"state_dtype": "bfloat16"},
    "one side too long": {"max_dim": 100},
    "both sides of some too long": {"max_dim": 40},
    "without the experts": {"rotate": {"exclude": ["experts.*"]}},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A current folder with the user's model in toy_model.py."""
    (tmp_path / "toy_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    for name in ("toy_model", "broken_model", "needy_model"):  # what an earlier test imported from its own folder
        sys.modules.pop(name, None)
    return tmp_path


def configuration(folder, params=None, optimizer="BasisRotation", zero=None):
    path = folder / "ds.json"
    block = {} if zero is None else {"zero_optimization": zero}
    path.write_text(json.dumps({"train_batch_size": 1, "optimizer": {"type": optimizer, "params": params or {}}, **block}))
    return path


def figures(folder, params=None, *arguments):
    """What plan writes as JSON for toy_model:Model."""
    target = folder / "plan.json"
    assert main(["plan", str(configuration(folder, params)), "--model", "toy_model:Model", "--json", str(target), *arguments]) == 0
    return json.loads(target.read_text())


def toy_model(**shape):
    sys.path.insert(0, os.getcwd())
    try:
        import toy_model
    finally:
        sys.path.pop(0)
    return toy_model.Model(**shape)


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_is_what_the_optimizer_holds(folder, variant):
    planned = figures(folder, VARIANTS[variant], "--arg", "width=32")["totals"]
    model = toy_model(width=32)
    params = dict(VARIANTS[variant])
    optimizer = BasisRotation(param_groups(model, rotate=params.pop("rotate", None)), **params)
    for p in model.parameters():
        p.grad = torch.randn(p.shape)
    optimizer.step()
    assert state_bytes(optimizer) == pytest.approx(planned["state_bytes"], rel=0.02)
    assert planned["adamw_state_bytes"] == 8 * sum(p.numel() for p in model.parameters())


def test_rows_join_equal_matrices_and_follow_the_formula(folder):
    plan = figures(folder)
    rows = {(row["parameters"][0], row["part"]): row for row in plan["rows"]}
    up = rows["blocks.0.up.weight", ""]
    assert up["parameters"] == ["blocks.0.up.weight", "blocks.1.up.weight"]
    assert (up["shape"], up["sides"], up["matrices"]) == ([32, 8], "both", 2)
    # numbers: two moments, two bases, two covariances (k^2 below 128)
    assert up["state_bytes"] == 2 * 4 * (2 * 32 * 8 + 2 * (32 * 32 + 8 * 8))
    # two two-sided rotations, G G^T and G^T G
    assert up["update_madds"] == 2 * (2 * 32 * 8 * (32 + 8) + 32 * 32 * 8 + 8 * 8 * 32)
    experts = rows["experts.weight", ""]
    assert (experts["shape"], experts["matrices"]) == ([8, 16], 3)
    totals = plan["totals"]
    assert totals["rotated_state_bytes"] == sum(row["state_bytes"] for row in plan["rows"])
    assert totals["update_madds"] == sum(row["update_madds"] for row in plan["rows"])
    assert totals["rotated_matrices"] == sum(row["matrices"] for row in plan["rows"])
    assert 10 * totals["mean_refresh_madds"] == pytest.approx(sum(row["refresh_madds"] for row in plan["rows"]))


def test_equal_shapes_that_are_other_parts_have_rows_of_their_own(folder):
    plan = figures(folder, {"rotate": {"layout": {"*.qkv.weight": {"rows": [8, 8, 8], "names": ["q", "k", "v"]}}}})
    rows = [row for row in plan["rows"] if row["parameters"][0] == "blocks.0.qkv.weight"]
    assert [(row["part"], row["shape"], row["matrices"]) for row in rows] == [(name, [8, 8], 2) for name in "qkv"]


def test_stagger_spreads_the_refreshes_of_a_period(folder):
    spread, at_once = (figures(folder, {"stagger": stagger, "refresh_period": 4})["totals"] for stagger in (True, False))
    assert spread["mean_refresh_madds"] == at_once["mean_refresh_madds"]
    assert at_once["worst_refresh_madds"] == 4 * at_once["mean_refresh_madds"]
    assert spread["mean_refresh_madds"] <= spread["worst_refresh_madds"] < at_once["worst_refresh_madds"]


def test_geometries_are_compared_with_the_one_chosen(folder):
    plan = figures(folder, {"geometry": "auto"})
    assert plan["geometries"]["auto"] == plan["totals"]
    state = {geometry: totals["state_bytes"] for geometry, totals in plan["geometries"].items()}
    assert state["unilateral"] < state["auto"] < state["bilateral"]
    assert plan["geometries"]["bilateral"] == figures(folder)["totals"]


def test_what_is_not_rotated_gets_adamw(folder):
    totals = figures(folder, {"max_dim": 8})["totals"]
    model = toy_model()
    names = [name for name, p in model.named_parameters() if p.ndim > 1 and name.startswith(("blocks", "experts"))]
    assert totals["rotated_parameters"] == len(names)
    assert totals["rotated_parameters"] + totals["other_parameters"] == len(list(model.parameters()))
    assert totals["other_state_bytes"] == 8 * totals["other_numbers"]


def test_the_table_names_matrices_totals_and_the_chosen_geometry(capsys, folder):
    main(["plan", str(configuration(folder, {"stagger": False})), "--model", "toy_model:Model.wide", "--arg", "width=16"])
    output = capsys.readouterr().out
    assert "blocks.*.up.weight" in output and "64 x 16" in output and "bilateral (chosen)" in output
    assert "plain AdamW" in output and 'all at once ("stagger": false)' in output


def plan_of_ranks(folder, zero, *arguments):
    target = folder / "plan.json"
    path = str(configuration(folder, zero=zero))
    assert main(["plan", path, "--model", "toy_model:Model", "--json", str(target), *arguments]) == 0
    return json.loads(target.read_text())


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_ranks_share_state_and_work(folder, stage):
    plan = plan_of_ranks(folder, {"stage": stage}, "--ranks", "4", "--arg", "layers=6")
    ranks, totals = plan["ranks"], plan["totals"]
    assert (ranks["stage"], ranks["ranks"], len(ranks["by_rank"]["state_bytes"])) == (stage, 4, 4)
    assert sum(ranks["by_rank"]["state_bytes"]) == totals["state_bytes"]
    assert ranks["rotation_state_bytes"]["mean"] == totals["rotated_state_bytes"] / 4
    assert 1 <= ranks["rotation_state_bytes"]["imbalance"] < 1.3


def test_the_stage_is_the_configurations(folder):
    assert "ranks" not in plan_of_ranks(folder, {"stage": 2})
    for zero in (None, {}, {"stage": 0}):
        ranks = plan_of_ranks(folder, zero, "--ranks", "2")["ranks"]
        assert ranks["stage"] == 0
        assert ranks["state_bytes"]["imbalance"] == 1
        assert ranks["exchanged_bytes"]["most"] == 0


def test_the_table_of_ranks_says_what_moves_and_why(capsys, folder):
    path = str(configuration(folder, zero={"stage": 1, "round_robin_gradients": True}))
    main(["plan", path, "--model", "toy_model:Model", "--ranks", "8"])
    output = capsys.readouterr().out
    assert "ZeRO 1, data-parallel ranks: 8" in output and "state of rotated matrices" in output and "sent in an update" in output
    assert "9 matrices move to their owner and back" in output and "messages each way" in output
    assert 'with "stagger": false' in output
    assert "zero_optimization.round_robin_gradients is set" in output


@pytest.mark.parametrize("ranks", ("0", "-2", "two", "1.5"))
def test_a_wrong_number_of_ranks_gets_one_line(capsys, folder, ranks):
    line = refusal(capsys, "plan", configuration(folder), "--model", "toy_model:Model", f"--ranks={ranks}")
    assert "--ranks" in line and "must be a whole number of at least 1" in line


def test_a_stage_that_zero_does_not_have_gets_one_line(capsys, folder):
    line = refusal(capsys, "plan", configuration(folder, zero={"stage": 4}), "--model", "toy_model:Model", "--ranks", "2")
    assert "zero_optimization.stage: must be 0, 1, 2 or 3, got 4" in line


def test_json_on_stdout_comes_alone(capsys, folder):
    assert main(["plan", str(configuration(folder)), "--model", "toy_model:Model", "--arg", "name=x=y", "--json", "-"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["options"]["refresh_period"] == 10
    assert "building x=y" in output.err and "geometries" in output.err


def test_arguments_are_json_where_they_can_be(folder):
    check = "\ndef check(**given):\n    assert given == {'a': [1], 'b': 'x', 'c': None}, given\n    return Model()\n"
    (folder / "toy_model.py").write_text(MODEL + check)
    given = ["--arg", "a=[1]", "--arg", "b=x", "--arg", "c=null"]
    assert main(["plan", str(configuration(folder)), "--model", "toy_model:check", *given]) == 0


WRONG = {
    "no_such_model:Model": "--model: no module 'no_such_model', neither in the current folder nor installed",
    "no_such.model:Model": "--model: no module 'no_such.model'",
    "broken_model:Model": "--model: importing broken_model failed with SyntaxError",
    "needy_model:Model": "--model: importing needy_model failed with ModuleNotFoundError: No module named 'no_such_dependency'",
    "toy_model:Modle": "has no 'Modle'",
    "toy_model:constant": "--model: toy_model:constant cannot be called, it is a int",
    "toy_model:Model.wide": "--model: toy_model:Model.wide failed with TypeError: ",
    "toy_model:reads_numbers": "under torch.device('meta')",
    "toy_model:leaves": "failed with SystemExit: usage: none",
    "toy_model:number": "--model: toy_model:number must return a torch.nn.Module or a list of layers, got int",
    "toy_model:vectors": "ds.json: nothing would be rotated",
    "toy_model": "--model: must be MODULE:CALLABLE",
    ":Model": "--model: must be MODULE:CALLABLE",
}


@pytest.mark.parametrize("model", WRONG)
def test_a_model_that_cannot_be_had_gets_one_line(capsys, folder, model):
    (folder / "broken_model.py").write_text("def Model(:\n")
    (folder / "needy_model.py").write_text("import no_such_dependency\n")
    assert WRONG[model] in refusal(capsys, "plan", configuration(folder), "--model", model)


@pytest.mark.parametrize(
    ("argument", "expected"), [("layers", "--arg: must be KEY=VALUE"), ("=1", "--arg: must be KEY=VALUE"), ("depth=1", "'depth'")]
)
def test_a_wrong_argument_gets_one_line(capsys, folder, argument, expected):
    assert expected in refusal(capsys, "plan", configuration(folder), "--model", "toy_model:Model", "--arg", argument)


def test_an_argument_given_twice_gets_one_line(capsys, folder):
    line = refusal(capsys, "plan", configuration(folder), "--model", "toy_model:Model", "--arg", "width=8", "--arg", "width=16")
    assert "--arg: width is given twice" in line


def test_a_wrong_configuration_gets_one_line(capsys, folder):
    def line(**block):
        return refusal(capsys, "plan", configuration(folder, **block), "--model", "toy_model:Model")

    assert "optimizer.type: is 'AdamW'; set it to \"BasisRotation\"" in line(optimizer="AdamW")
    assert "ds.json: optimizer.params.geometry: must be one of" in line(params={"geometry": "trilateral"})
    assert "ds.json: optimizer.params.rotate.include: 'nothing' matches no parameter" in line(params={"rotate": {"include": ["nothing"]}})
    assert "No such file" in refusal(capsys, "plan", folder / "missing.json", "--model", "toy_model:Model")


def test_plan_needs_no_deepspeed(folder):
    code = "import sys; sys.modules['deepspeed'] = None; from ds_basisrot.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONSAFEPATH": "1"}
    arguments = ["plan", str(configuration(folder)), "--model", "toy_model:Model"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "blocks.*.up.weight" in done.stdout


def test_numbers_of_layers_are_not_part_of_a_name():
    assert name_pattern("blocks.3.mlp.fc2.weight") == "blocks.*.mlp.fc2.weight"
    assert name_pattern("0.weight") == "*.weight"
