"""`ds-basisrot simulate`: contestants on equal terms, runs that can be repeated, figures that follow from the curves, one-line errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_refusal import refusal

from ds_basisrot import BasisRotation, param_groups
from ds_basisrot.bench.convergence import MAX_GRAD_NORM, Curve, Setting, run
from ds_basisrot.bench.optimizer_block import OptimizerBlock
from ds_basisrot.bench.text import read_text
from ds_basisrot.bench.tiny_gpt import cut, next_byte_loss, tiny_gpt
from ds_basisrot.cli import main
from ds_basisrot.cli.simulate import DEFAULT_OPTIMIZERS

SHAPE = {"layers": 3, "width": 8, "heads": 2, "context": 8, "batch": 2}
SETTING = Setting(stages=3, updates=9, eval_every=4, **SHAPE)
BLOCKS = {
    "AdamW": OptimizerBlock.read({"type": "AdamW"}, 1e-2),
    "NAdam": OptimizerBlock.read({"type": "NAdam", "params": {"decoupled_weight_decay": True}}, 1e-2),
    "SGD": OptimizerBlock.read({"type": "SGD", "params": {"momentum": 0.9}}, 1e-2),
    "BasisRotation": OptimizerBlock.read({"type": "BasisRotation", "params": {"refresh_period": 3}}, 1e-2),
}


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    path.write_text("".join(f"{n} green bottles hanging on the wall, " for n in range(300)))
    return path


@pytest.fixture(scope="session")
def text(text_file):
    return read_text(text_file, SHAPE["context"])


def arguments(text_file, *optimizers, **options):
    given = {**SHAPE, "stages": 3, "updates": 9, "eval_every": 4, "lr": 1e-2, "text": text_file, **options}
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return ["simulate", *flags, *(part for each in optimizers for part in ("--optimizer", each))]


def figures(capsys, *given, **options):
    assert main([*arguments(*given, **options), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def losses(curve):
    return curve.updates, curve.held_out_loss, curve.training_loss


@pytest.mark.parametrize("name", BLOCKS)
def test_one_stage_is_plain_training(text, name):
    setting = Setting(stages=1, updates=9, eval_every=9, **SHAPE)
    model = tiny_gpt(3, 8, 2, 8, seed=5)
    params = dict(BLOCKS[name].params)
    if name == "BasisRotation":
        optimizer = BasisRotation(param_groups(model), **params)
    else:
        optimizer = getattr(torch.optim, name)(model.parameters(), **params)
    mean_loss = 0.0
    for update, sequences in enumerate(setting.batches(text, seed=5).long()):
        for group in optimizer.param_groups:
            group["lr"] = params["lr"] * setting.lr_share(update)
        loss = next_byte_loss(model(sequences[:, :-1]), sequences[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        mean_loss += loss.item() / 9
    held_out = text.held_out_sequences(128, 8).long()
    held_out_loss = next_byte_loss(model(held_out[:, :-1]), held_out[:, 1:]).item()

    curve = run(setting, BLOCKS[name], text, seed=5)
    assert curve.training_loss == [pytest.approx(mean_loss, abs=1e-6)]
    assert curve.held_out_loss == [pytest.approx(held_out_loss, abs=1e-6)]


def test_staleness_changes_the_run_and_nothing_else_does(text):
    fresh, stale, again = (run(Setting(stages, 9, eval_every=1, **SHAPE), BLOCKS["BasisRotation"], text, 0) for stages in (1, 3, 3))
    assert losses(stale) == losses(again)
    assert stale.training_loss[0] == fresh.training_loss[0]  # the same weights and the same batch
    assert stale.training_loss[1:] != fresh.training_loss[1:]


def test_contestants_start_from_the_same_weights_and_see_the_same_batches(text):
    setting = Setting(stages=3, updates=3, eval_every=1, **SHAPE)
    idle = [OptimizerBlock.read({"type": kind, "params": {"lr": 0.0}}, 1.0) for kind in ("AdamW", "NAdam", "SGD", "BasisRotation")]
    curves = [losses(run(setting, block, text, seed=1)) for block in idle]
    assert all(curve == curves[0] for curve in curves)
    assert losses(run(setting, idle[0], text, seed=2)) != curves[0]


def test_the_order_of_contestants_does_not_matter(capsys, text_file):
    adamw, rotated = 'a={"type": "AdamW"}', 'b={"type": "BasisRotation"}'
    one, other = (figures(capsys, text_file, *order)["optimizers"] for order in ((adamw, rotated), (rotated, adamw)))
    for name in "ab":
        assert one[name]["runs"][0]["held_out_loss"] == other[name]["runs"][0]["held_out_loss"]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_route_their_parameters_as_the_stages_of_a_job_do(stages):
    parts = cut(tiny_gpt(**{key: SHAPE[key] for key in ("layers", "width", "heads", "context")}, seed=0), stages)
    for k, (stage, optimizer) in enumerate(zip(parts, BLOCKS["BasisRotation"].build(parts))):
        alone = BasisRotation(param_groups(stage, holds_output=k == stages - 1))
        assert [(g["param_names"], g["rotate"]) for g in optimizer.param_groups] == [
            (g["param_names"], g["rotate"]) for g in alone.param_groups
        ]


def test_a_cut_gives_every_stage_blocks_and_leaves_nothing_out():
    model = tiny_gpt(layers=5, width=8, heads=2, context=8, seed=0)
    names = [[name for name, _ in stage.named_children()] for stage in cut(model, 3)]
    assert names == [["0", "1"], ["2", "3"], ["4", "5", "6"]]


def test_patterns_are_matched_in_the_whole_model():
    parts = cut(tiny_gpt(layers=3, width=8, heads=2, context=8, seed=0), 3)
    optimizers = OptimizerBlock.read({"type": "BasisRotation", "params": {"rotate": {"exclude": ["1.*"]}}}, 1e-3).build(parts)
    rotated = [any(entry is not False for g in o.param_groups for entry in g["rotate"]) for o in optimizers]
    assert rotated == [False, True, True]


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    setting = Setting(stages=1, updates=50, eval_every=1, **SHAPE)
    shares = [setting.lr_share(update) for update in range(51)]
    assert shares[:6] == [pytest.approx(share) for share in (0.2, 0.4, 0.6, 0.8, 1.0, 1.0)]
    assert shares[50] == pytest.approx(0.1) and sorted(shares[5:], reverse=True) == shares[5:]


def test_the_end_of_the_text_is_held_out(text, text_file):
    whole = text_file.read_bytes()
    assert bytes(text.train) + bytes(text.held_out) == whole and len(text.held_out) == len(whole) // 20
    held_out = text.held_out_sequences(5, 8)
    assert bytes(held_out[0]) == bytes(text.held_out[:9]) and bytes(held_out[-1]) == bytes(text.held_out[-9:])
    assert all(bytes(row) in bytes(text.train) for row in text.training_sequences(50, 8, seed=0))


def test_json_has_the_curves_and_what_is_needed_to_run_again(capsys, text_file):
    result = figures(capsys, text_file, 'plain={"type": "adamw"}', 'ours={"type": "BasisRotation", "params": {"lr": 0.5}}', seeds="0,3")
    assert set(result) == {"settings", "text", "versions", "optimizers"}
    assert result["settings"].items() >= {**SHAPE, "stages": 3, "updates": 9, "seeds": [0, 3], "lr": 1e-2}.items()
    assert result["text"]["source"] == str(text_file) and len(result["text"]["sha256"]) == 64
    plain, ours = result["optimizers"].values()
    assert (plain["type"], plain["params"], ours["params"]) == ("AdamW", {"lr": 1e-2}, {"lr": 0.5})
    for each in (plain, ours):
        assert [curve["seed"] for curve in each["runs"]] == [0, 3]
        for curve, reference in zip(each["runs"], plain["runs"]):
            assert curve["updates"] == [4, 8, 9]
            assert len(curve["held_out_loss"]) == len(curve["training_loss"]) == 3
            assert curve["final_loss"] == curve["held_out_loss"][-1]
            assert curve["minus_first"] == curve["final_loss"] - reference["final_loss"]
            assert curve["seconds"] > 9 * curve["optimizer_ms"] / 1e3 > 0
        final = [curve["final_loss"] for curve in each["runs"]]
        assert each["final_loss"] == {"mean": pytest.approx(sum(final) / 2), "lowest": min(final), "highest": max(final)}
    assert plain["minus_first"] == {"mean": 0, "lowest": 0, "highest": 0}


def test_the_table_has_a_row_for_each_optimizer_and_names_the_reference(capsys, text_file):
    assert main(arguments(text_file, 'one={"type": "AdamW"}', '[two]={"type": "SGD"}', seeds="0,1")) == 0
    output = capsys.readouterr()
    assert output.err == ""
    rows = [line for line in output.out.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == ["one", "[two]"]
    assert "minus one's" in output.out and "mean (lowest to highest) of seeds 0, 1" in output.out


def test_by_default_adamw_is_compared_with_the_three_geometries(capsys, text_file):
    assert list(figures(capsys, text_file, updates=2)["optimizers"]) == ["AdamW", "bilateral", "auto", "unilateral"]
    assert next(iter(DEFAULT_OPTIMIZERS.values()))["type"] == "AdamW"


def test_a_run_whose_loss_is_not_finite_ends_early_and_says_so(capsys, text_file):
    wild, tame = 'wild={"type": "SGD", "params": {"lr": 1e12}}', 'tame={"type": "SGD"}'
    result = figures(capsys, text_file, wild, tame)["optimizers"]
    assert result["wild"]["final_loss"] is None and result["wild"]["runs"][0]["updates"][-1] < 9
    assert result["tame"]["final_loss"] is not None and result["tame"]["updates_to_first"] is None
    assert main(arguments(text_file, tame, wild)) == 0
    assert "not finite" in capsys.readouterr().out


def test_updates_to_a_loss_count_to_the_first_that_was_as_low():
    curve = Curve(0, updates=[10, 20, 30, 35], held_out_loss=[4.0, 3.0, 3.5, None])
    assert [curve.updates_to(loss) for loss in (3.5, 3.0, 2.9, None)] == [20, 20, None, None]


WRONG_BLOCKS = {
    "AdamW": 'argument --optimizer: must be NAME={"type": "AdamW"',
    '{"type": "AdamW", "params": {"a": "b=c"}}': "argument --optimizer: must be NAME=",
    'x={"type": "AdamW"': "argument --optimizer: x: not valid JSON",
    "x=3": '--optimizer x: must be an object such as {"type": "AdamW"',
    'x={"params": {}}': "--optimizer x: type: unknown optimizer None; valid: BasisRotation, AdamW, NAdam, SGD",
    'x={"type": "BasisRotatoin"}': "--optimizer x: type: unknown optimizer 'BasisRotatoin'; did you mean 'BasisRotation'?",
    'x={"type": "AdamW", "parms": {}}': "--optimizer x: optimizer block: unknown key 'parms'; did you mean 'params'?",
    'x={"type": "AdamW", "params": [1]}': "--optimizer x: params: must be an object",
    'x={"type": "AdamW", "params": {"momentum": 0.9}}': "--optimizer x: params: unknown key 'momentum'",
    'x={"type": "AdamW", "params": {"capturable": true}}': "--optimizer x: params: unknown key 'capturable'",
    'x={"type": "AdamW", "params": {"betas": 0.9}}': "--optimizer x: params.betas: must be two numbers in [0, 1)",
    'x={"type": "AdamW", "params": {"lr": "high"}}': "--optimizer x: params.lr: must be a number, got 'high'",
    'x={"type": "AdamW", "params": {"fused": 1}}': "--optimizer x: params.fused: must be true, false or null, got 1",
    'x={"type": "SGD", "params": {"nesterov": 1}}': "--optimizer x: params.nesterov: must be true or false, got 1",
    'x={"type": "SGD", "params": {"momentum": -1}}': "--optimizer x: params: Invalid momentum value: -1",
    'x={"type": "SGD", "params": {"nesterov": true}}': "--optimizer x: params: Nesterov momentum requires",
    'x={"type": "BasisRotation", "params": {"geometri": 1}}': "--optimizer x: params: unknown key 'geometri'; did you mean 'geometry'?",
    'x={"type": "BasisRotation", "params": {"geometry": "both"}}': "--optimizer x: params.geometry: must be one of bilateral",
    'x={"type": "BasisRotation", "params": {"rotate": {"include": ["no"]}}}': "rotate.include: 'no' matches no parameter",
    'x={"type": "BasisRotation", "params": {"rotate": {"exclude": ["*"]}}}': "--optimizer x: params: nothing would be rotated",
}


@pytest.mark.parametrize("block", WRONG_BLOCKS)
def test_a_wrong_optimizer_gets_one_line(capsys, text_file, block):
    assert WRONG_BLOCKS[block] in refusal(capsys, *arguments(text_file, block))


WRONG_OPTIONS = [
    ({"stages": 4}, "--stages: must be 1 to the number of blocks, 3, got 4"),
    ({"width": 9}, "--width: must be a multiple of heads (2), got 9"),
    ({"updates": 0}, "--updates: must be a whole number of at least 1, not '0'"),
    ({"lr": "nan"}, "--lr: must be a number of at least 0, not 'nan'"),
    ({"seeds": "0,0"}, "must be different whole numbers from 0 to 2^32 - 1, such as 0,1, not '0,0'"),
    ({"seeds": "a"}, "must be different whole numbers"),
    ({"text": "missing.txt"}, "--text: cannot read missing.txt: No such file or directory"),
    ({"text": os.devnull}, "has 0 bytes; its training part and its held-out part need 9 each"),
    ({"json": "no/such/folder.json"}, "--json: cannot write no/such/folder.json"),
]


@pytest.mark.parametrize(("options", "expected"), WRONG_OPTIONS)
def test_a_wrong_option_gets_one_line(capsys, text_file, options, expected):
    assert expected in refusal(capsys, *arguments(text_file, **options))


def test_a_name_given_twice_gets_one_line(capsys, text_file):
    line = refusal(capsys, *arguments(text_file, 'x={"type": "SGD"}', 'x={"type": "AdamW"}'))
    assert "--optimizer: the name 'x' is given twice" in line


def test_simulate_needs_no_deepspeed(text_file):
    code = "import sys; sys.modules['deepspeed'] = None; from ds_basisrot.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code, *arguments(text_file, updates=1)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=text_file.parent)
    assert done.returncode == 0, done.stderr
    assert "unilateral" in done.stdout
