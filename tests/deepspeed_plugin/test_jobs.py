"""Real DeepSpeed jobs beside the exactness matrix: BasisRotation without a pipeline, refusals before training, jobs that die."""

import time

import pytest
import torch
from models import BATCH, OPTIMIZERS, WIDTH, blocks, microbatch
from processes import HERE, run_cases, run_job
from simulate import load

from ds_basisrot import BasisRotation, param_groups

PLAIN = [
    {"name": "plain", "pipeline": False, "optimizer": "BasisRotation", "clip": 0.1},
    {"name": "plain-accumulated", "pipeline": False, "optimizer": "BasisRotation", "gas": 2, "updates": 6},
]

DIAGNOSED = {"optimizer": "BasisRotation", "monitored": True, "config": {"optimizer.params.diagnostics_period": 4}}
PLAIN_DIAGNOSED = {**PLAIN[0], **DIAGNOSED, "name": "plain-diagnosed"}
# Pairs that differ in the diagnostics alone.
PIPELINES = [
    {
        "name": f"{schedule}-{'diagnosed' if diagnosed else 'monitored'}",
        "schedule": schedule,
        **DIAGNOSED,
        **({} if diagnosed else {"config": {}}),
    }
    for schedule in ("async_1f1b", "1f1b")
    for diagnosed in (True, False)
]
ALLOCATED = {"optimizer": "BasisRotation", "updates": 4, "config": {"optimizer.params.refresh_allocation": "stage_aware"}}
ALLOCATIONS = [
    {**ALLOCATED, "name": "allocated", "batch_size_after": [2, 4 * BATCH]},
    {**ALLOCATED, "name": "allocated-synchronous", "schedule": "1f1b"},
]

REFUSED = [
    ({"config": {"pipeline.schedule": "async1f1b"}}, "pipeline.schedule: must be '1f1b' or 'async_1f1b'"),
    ({"config": {"pipeline.wieght_stashing": True}}, "did you mean 'weight_stashing'?"),
    ({"config": {"zero_optimization.stage": 2}}, "zero_optimization.stage: DeepSpeed's pipelines run with stages 0 and 1, got 2"),
    ({"optimizer": "BasisRotation", "config": {"optimizer.params.refresh_perod": 3}}, "did you mean 'refresh_period'?"),
    ({"optimizer": "BasisRotation", "config": {"optimizer.params.refresh_period": 0}}, "optimizer.params.refresh_period: must be"),
    ({"optimizer": "BasisRotation", "config": {"optimizer.type": "BasisRotatoin"}}, "did you mean 'BasisRotation'?"),
    ({"optimizer": "BasisRotation", "config": {"fp16.enabled": True}}, "fp16.enabled: async_1f1b cannot share a loss scale"),
    ({"optimizer": "BasisRotation", "config": {"optimizer.params.rotate": {"exclude": ["*"]}}}, "nothing would be rotated"),
    (
        {"optimizer": "BasisRotation", "config": {"optimizer.params.rotate": {"exclude": ["0.*", "x.*"]}}},
        "rotate.exclude: 'x.*' matches no",
    ),
    (
        {"optimizer": "BasisRotation", "config": {"optimizer.params.rotate": {"include": ["*.bias"]}}},
        "optimizer.params.rotate.include: '*.bias'",
    ),
    ({"layers": 1}, "stage 0 of 2 would hold no layer (1 layers in all)|stage 1 of 2 would hold no layer (1 layers in all)"),
    (
        {"tied": True, "config": {"pipeline.lr_correction_updates": 10}},
        "pipeline.lr_correction_updates: tied weights would get two learning rates",
    ),
    (
        {"optimizer": "SGD", "config": {"pipeline.weight_prediction": True}},
        "pipeline.weight_prediction: needs Adam, AdamW or BasisRotation",
    ),
    ({"config": {"pipeline.trace": "/proc/nowhere"}}, "pipeline.trace: cannot write /proc/nowhere/stage_00"),
    (
        {
            "pipeline": False,
            "optimizer": "BasisRotation",
            "config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        },
        "zero_optimization.offload_optimizer: BasisRotation multiplies matrices",
    ),
    (
        {
            "pipeline": False,
            "optimizer": "BasisRotation",
            "config": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
        },
        "zero_optimization.offload_optimizer: BasisRotation multiplies matrices",
    ),
    (
        {"config_of_rank_1": {"pipeline.weight_stashing": False}},
        "rank 1 differs from rank 0 in pipeline.weight_stashing: False against True",
    ),
    (
        {"pipeline": False, "optimizer": "BasisRotation", "config_of_rank_1": {"optimizer.params.refresh_period": 7}},
        "rank 1 differs from rank 0 in optimizer.params.refresh_period: 7 against 3",
    ),
]
REFUSED_CASES = [{**case, "name": f"refused-{i}", "refused": True} for i, (case, _) in enumerate(REFUSED)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    # DeepSpeed cannot build a plain engine in a process that has had a pipeline: those first.
    cases = sorted([*PLAIN, PLAIN_DIAGNOSED, *REFUSED_CASES], key=lambda case: case.get("pipeline", True))
    head = {"name": "with-head", "head": True, "optimizer": "BasisRotation", "updates": 2}
    parts = [{"name": "linear-ends-stage-0", "linears": 2}, {"name": "a-block-is-stage-1", "layers": 2}]
    parts = [{**part, "optimizer": "BasisRotation", "updates": 2} for part in parts]
    job = run_cases(2, [*cases, head, *parts, *PIPELINES, *ALLOCATIONS, {"name": "after-all-that"}], folder)
    return lambda name: load(folder, name), job.stderr, folder


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case["name"])
def test_basis_rotation_without_a_pipeline_is_the_plain_loop(results, case):
    torch.manual_seed(0)
    module = torch.nn.Sequential(*blocks(2), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = BasisRotation(param_groups(module), **OPTIMIZERS["BasisRotation"]["params"])
    gas, updates = case.get("gas", 1), case.get("updates", 12)
    for update in range(updates):
        optimizer.zero_grad()
        for index in range(update * gas, (update + 1) * gas):
            for replica in range(2):
                x, y = microbatch(index, replica)
                (torch.nn.functional.mse_loss(module(x), y) / gas / 2).backward()
        if case.get("clip"):
            torch.nn.utils.clip_grad_norm_(module.parameters(), case["clip"])
        optimizer.step()
    for r in results[0](case["name"]):
        assert r["optimizer"] == "BasisRotation" and r["global_steps"] == updates
        for name, p in module.named_parameters():
            torch.testing.assert_close(r["weights"][name], p.detach(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=lambda i: REFUSED[i][1][:50])
def test_it_is_refused_before_training_on_every_rank(results, index):
    for r in results[0](f"refused-{index}"):
        assert r["message"] is not None and "\n" not in r["message"]
        assert any(expected in r["message"] for expected in REFUSED[index][1].split("|"))


def test_only_the_stage_that_holds_the_head_leaves_it_out(results):
    """Stage 0 ends in a block, stage 1 in the output head, and neither sees the other."""
    rotated = [r["rotated"] for r in results[0]("with-head")]
    assert rotated == [[f"{i}.{layer}.weight" for i in stage for layer in ("up", "down")] for stage in ((0, 1, 2), (3,))]


@pytest.mark.parametrize(
    "name, rotated",
    [
        ("linear-ends-stage-0", [["0.weight", "1.weight"], [f"{i}.{layer}.weight" for i in (2, 3) for layer in ("up", "down")]]),
        ("a-block-is-stage-1", [[f"{i}.{layer}.weight" for layer in ("up", "down")] for i in (0, 1)]),
    ],
)
def test_a_stage_is_not_taken_for_a_whole_model(results, name, rotated):
    """What ends a stage is not the output head, and neither is the last of several equal blocks that is alone on its stage."""
    assert [r["rotated"] for r in results[0](name)] == rotated


def test_a_log_line_counts_what_is_rotated(results):
    assert "BasisRotation, rotated: 8 (8 linear weight); AdamW: 18 (16 norm or bias, 2 output head)" in results[1]


def test_a_log_line_says_what_is_active(results):
    assert "pipeline schedule async_1f1b (from the JSON), 2 stages, weight stashing" in results[1]
    assert "staleness per stage [1, 0] microbatches" in results[1]


DIAGNOSED_PAIRS = [("plain-diagnosed", "plain"), *(tuple(case["name"] for case in PIPELINES[i : i + 2]) for i in (0, 2))]


@pytest.mark.parametrize("diagnosed, other", DIAGNOSED_PAIRS)
def test_diagnostics_are_monitor_events_and_leave_training_bitwise_unchanged(results, diagnosed, other):
    load_results, _, folder = results
    for a, b in zip(load_results(diagnosed), load_results(other)):
        assert a["weights"].keys() == b["weights"].keys()
        assert all(torch.equal(w, b["weights"][name]) for name, w in a["weights"].items())
    samples = load_results(diagnosed)[0]["global_samples"] // 12
    events = {}
    for path in (folder / diagnosed / "events").glob("Train_Samples_basis_rotation_*.csv"):
        header, *rows = [line.split(",") for line in path.read_text().split()]
        assert header[0] == "step" and [int(step) for step, _ in rows] == [4 * samples, 8 * samples, 12 * samples]
        events[header[1]] = [float(value) for _, value in rows]
    assert len(events) == 9 and events["skipped_updates"] == [0, 0, 0]
    assert all(
        a <= b for metric in ("misalignment_rotated", "persistence") for a, b in zip(*(events[f"{metric}_{w}"] for w in ("mean", "max")))
    )
    assert all(0 < v < 1 for name in ("misalignment_standard_mean", "persistence_mean") for v in events[name])
    assert all(0 < v < 90 for v in events["refresh_angle_degrees_mean"])
    assert events["misalignment_rotated_mean"][-1] < 0.5 * events["misalignment_standard_mean"][-1]


def test_diagnostics_are_off_by_default(results):
    for _, other in DIAGNOSED_PAIRS[1:]:
        paths = [path.name for path in (results[2] / other / "events").iterdir()]
        assert "Train_Samples_lr.csv" in paths and not any("basis_rotation" in path for path in paths)


def test_every_stage_logs_its_diagnostics(results):
    lines = [line for line in results[1].splitlines() if "misalignment_rotated_mean" in line]
    for start, number in (("stage 0: update 8: ", 2), ("stage 1: update 8: ", 2), ("update 8: ", 5)):
        assert sum(start in line for line in lines) == number  # two pipelines, one engine without
    assert len(lines) == 15


def test_stages_log_how_they_share_the_refreshes_and_follow_the_batch_size(results):
    log = results[1]
    for line in (
        "stage 0: refreshes every 2.25 updates (uniform: 3), share of the budget 67%",
        "stage 1: refreshes every 4.5 updates (uniform: 3), share of the budget 33%",
        "stage 0: refreshes every 2.7 updates (uniform: 3), share of the budget 56%",  # after two updates: 4 microbatches in each
        "stage 1: refreshes every 3.38 updates (uniform: 3), share of the budget 44%",
        "refresh_allocation stage_aware is the same as uniform here: without pipeline.schedule async_1f1b no gradient is late",
    ):
        assert log.count(line) == 1, line
    assert "give each stage a parameter group" not in log


@pytest.mark.parametrize(
    "fault, message",
    [
        ("the loader ends", "StopIteration: the data iterator has fewer microbatches left than an update needs (1)"),
        ("no iterator", "train_batch(): no data iterator"),
        ("a layer raises", "RuntimeError: the third forward fails: Broken pipe"),
        ("a rank is killed", ""),
    ],
)
def test_a_job_that_cannot_go_on_ends_at_once_with_the_reason(fault, message):
    start = time.monotonic()
    job = run_job(2, HERE / "faulty_job.py", fault)
    assert job.returncode != 0 and time.monotonic() - start < 60
    assert message in job.stderr + job.stdout


def test_a_script_that_catches_an_error_cannot_go_on_where_messages_are_lost():
    job = run_job(2, HERE / "faulty_job.py", "a layer raises, and the script goes on")
    assert job.returncode != 0
    caught = [line.partition("caught: ")[2] for line in job.stdout.splitlines() if "caught: " in line]
    assert sum("no data iterator" in line for line in caught) == 2
    assert sum("the third forward fails" in line for line in caught) == 1
    assert sum("stage 1 failed in the middle of an earlier call" in line for line in caught) == 4  # train, evaluate, drain, save
