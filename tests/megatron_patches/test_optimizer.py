"""BasisRotation inside Megatron's optimizers equals a plain loop over the same matrices, however Megatron slices them."""

import json
from pathlib import Path

import pytest
from megatron_processes import run_worker

pytest.importorskip("megatron.core")


# Processes -> cases of one world; those of four are in the long matrix.
EQUAL_TO_A_PLAIN_LOOP = {
    1: ["plain 1", "clipped 1", "bf16 1", "distributed 1", "two rates 1", "experts 1"],
    2: [
        "plain dp2",
        "distributed dp2",
        "collection dp2",
        "distributed buckets dp2",
        "bf16 dp2",
        "bf16 distributed dp2",
        "exact tp2",
        "exact distributed tp2",
        "exact one group tp2",
        "blockwise tp2",
        "blockwise distributed tp2",
        "experts ep2",
        "experts distributed ep2",
    ],
    4: ["exact tp2 dp2", "exact distributed tp2 dp2", "blockwise tp2 dp2", "experts exact tp2 ep2", "experts distributed ep2 dp4"],
}
RESUMES = {
    1: ["resumes 1"],
    2: ["resumes dp2", "resumes bf16 dp2", "resumes distributed dp2", "resumes exact tp2", "resumes blockwise tp2"],
    4: [],
}
SKIPS = {1: [], 2: ["skips dp2", "skips blockwise tp2", "skips exact tp2"], 4: []}
OTHERS = {1: ["refusals"], 2: [], 4: []}

REFUSED = {
    "offload": "OptimizerConfig.optimizer_cpu_offload=True",
    "precision": "OptimizerConfig.use_precision_aware_optimizer=True",
    "fp16": "OptimizerConfig.fp16=True",
    "sgd": "OptimizerConfig.optimizer='sgd'",
    "l2": "OptimizerConfig.decoupled_weight_decay=False",
    "lr": "optimizer.params.lr: 1.0, but --lr of Megatron: 0.01",
    "betas": "optimizer.params.betas: [0.8, 0.9], but --adam-beta1, --adam-beta2 of Megatron: (0.9, 0.999)",
    "unknown": "unknown key 'geometri'; did you mean 'geometry'?",
    "mode": "optimizer.params.tp_mode: must be one of blockwise, exact, got 'exactly'; did you mean 'exact'?",
    "pattern": "optimizer.params.rotate.include: '*.nothing' matches no parameter",
    "nothing": "nothing would be rotated",
    "max_dim": "optimizer.params.max_dim: must be an integer >= 1",
    "diagnostics": "optimizer.params.diagnostics_period: not possible with Megatron",
    "bare": "GPTModel: BasisRotation needs megatron.core.distributed.DistributedDataParallel",
    "version": "megatron-core 0.15.0: megatron_patches is made for 0.16.x, 0.18 and newer",
    "name": "has no FP32Optimizer.no_such_name (a test)",
}


def run(processes: int, folder: Path) -> list[dict]:
    names = [name for table in (EQUAL_TO_A_PLAIN_LOOP, RESUMES, SKIPS, OTHERS) for name in table[processes]]
    done = run_worker(processes, "optimizer_worker.py", folder, *names)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of a case on every rank; the worlds start when they are first asked for."""
    worlds: dict[int, list[dict]] = {}

    def of(processes: int, name: str) -> list[dict]:
        if processes not in worlds:
            worlds[processes] = run(processes, tmp_path_factory.mktemp(f"world_{processes}"))
        found = [of_rank[name] for of_rank in worlds[processes]]
        for result in found:
            assert "error" not in result, result["error"]
        return found

    return of


def cases(table: dict[int, list[str]]) -> list:
    return [pytest.param(n, name, marks=[pytest.mark.full] * (n > 2)) for n, names in table.items() for name in names]


@pytest.mark.parametrize("processes, name", cases(EQUAL_TO_A_PLAIN_LOOP))
def test_equals_a_plain_loop(results, processes, name):
    for result in results(processes, name):
        assert result["deviation"] < 1e-6
        assert result["norm"] < 1e-6


@pytest.mark.parametrize("processes, name", cases(RESUMES))
def test_goes_on_from_states_by_name_bit_for_bit(results, processes, name):
    found = results(processes, name)
    for result in found:
        assert result["differing"] == result["differing copies"] == 0
        assert not result["names not asked"] and result["steps"]
    if name.endswith(("dp2", "exact tp2")):  # each matrix has its states on one rank, and both have some
        assert sum(result["rotated here"] for result in found) == 4 and all(result["rotated here"] for result in found)


@pytest.mark.parametrize("processes, name", cases(SKIPS))
def test_a_bad_gradient_of_one_rank_stops_all_of_them_once(results, processes, name):
    for result in results(processes, name):
        assert not result["moved"] and result["finite"]
        assert result["differing copies"] == 0 and all(result["skipped"])


@pytest.mark.parametrize("asked", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(results, asked):
    (messages,) = results(1, "refusals")
    assert REFUSED[asked] in messages[asked] and "\n" not in messages[asked]


def test_values_that_are_megatrons_own_may_be_given(results):
    (messages,) = results(1, "refusals")
    assert messages["same"] == ""
