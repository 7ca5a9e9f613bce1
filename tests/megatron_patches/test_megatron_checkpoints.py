"""torch_dist checkpoints of real Megatron processes: a job that was loaded goes on bit for bit, also on other numbers of ranks."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from megatron_processes import run_worker

pytest.importorskip("megatron.core")


# Worlds one after another: each may load what those before it have saved.
WORLDS = {
    "2": [
        "resumes one stage distributed",
        "saves distributed of 2",
        "saves two stages",
        "other stages",
    ],
    "4": ["resumes both", "resumes both distributed bf16 tied", "more replicas distributed"],
}
FULL_WORLDS = {
    "2": [
        "saves of Adam",
        *WORLDS["2"],
        *(f"resumes {name}" for name in ("adam", "one stage bf16", "both tied", "both experts")),
        *("saves plain of 2", "other period", "other geometry", "other optimizer", "async after Adam", "both after Adam"),
    ],
    "4": [
        *WORLDS["4"],
        *(f"resumes {name}" for name in ("adam four tied", "both bf16 tied", "both distributed", "both distributed experts")),
        *(f"resumes both {name}" for name in ("blockwise", "exact", "blockwise distributed bf16", "exact distributed bf16")),
        *("more replicas", "saves plain of 4", "more stages", "saves distributed of 4"),
        *("saves blockwise", "blockwise becomes exact", "blockwise on other ranks", "saves exact", "exact on other ranks"),
    ],
    "2 again": ["fewer replicas", "fewer replicas distributed"],
}


def cases(names: Sequence[str]) -> list[Any]:
    """Those that run by default, and those of the long matrix."""
    default = [name for each in WORLDS.values() for name in each]
    return [name if name in default else pytest.param(name, marks=pytest.mark.full) for name in names]


def beginning(start: str) -> list[Any]:
    return cases([name for each in FULL_WORLDS.values() for name in each if name.startswith(start)])


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Of each case, what its ranks found."""
    out = tmp_path_factory.mktemp("megatron_checkpoints")
    worlds = FULL_WORLDS if request.config.getoption("--full") else WORLDS
    found: dict[str, list[dict[str, Any]]] = {}
    for world, names in worlds.items():
        processes = int(world.split()[0])
        job = run_worker(processes, "checkpoint_worker.py", out, world, *names, timeout=600)
        for name in names:
            paths = [out / f"{name}.{rank}.json" for rank in range(processes)]
            missing = [path.name for path in paths if not path.exists()]
            assert not missing, f"no {missing[0]} (exit code {job.returncode}):\n{job.stdout[-3000:]}\n{job.stderr[-6000:]}"
            found[name] = [json.loads(path.read_text()) for path in paths]
    return found


def of(results: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    for each in results[name]:
        assert "error" not in each, each["error"]
    return results[name]


@pytest.mark.parametrize("name", beginning("resumes"))
def test_goes_on_bit_for_bit(results, name):
    for rank in of(results, name):
        assert rank["loaded"] == []
        assert rank["tensors"] == []
        assert rank["reports"] == []
        assert rank["moved"] > 1e-3 and rank["finite"]


@pytest.mark.parametrize("name", [*beginning("more replicas"), *beginning("fewer replicas")])
def test_other_replicas_find_what_was_saved(results, name):
    for rank in of(results, name):
        assert rank["loaded"] == [] and rank["said"] == []
        assert all(0 < norm < 1e6 for _, norm in rank["reports"])


@pytest.mark.parametrize("name", cases(["other stages", "more stages"]))
def test_other_stages_find_matrices_by_name(results, name):
    for rank in of(results, name):
        assert rank["loaded"] and all(path.startswith("ds_basisrot.stage/") for path in rank["loaded"])


@pytest.mark.full
def test_norms_of_other_stages_begin_anew(results):
    said = of(results, "more stages")[0]["said"]
    assert said == [
        "the checkpoint is of another number of stages or tensor-parallel ranks: gradient norms of other stages, and late gradients "
        "of tied embeddings, begin anew"
    ]


@pytest.mark.full
def test_other_refresh_period_goes_on_with_the_same_bases(results):
    assert all(rank["loaded"] == [] for rank in of(results, "other period"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("other geometry", "resume with the optimizer, geometry, source, max_dim and rotate it was saved with"),
        ("other optimizer", "the checkpoint has states of BasisRotation, which the optimizer of this job cannot take up"),
        ("exact on other ranks", "resume with that one, or without optimizer state"),
    ],
)
def test_refused(results, name, line):
    for rank in of(results, name):
        assert line in rank["refused"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["blockwise becomes exact", "blockwise on other ranks"])
def test_matrices_of_other_ranks_begin_anew(results, name):
    ranks = of(results, name)
    assert any("these begin anew, as at another tensor-parallel size or tp_mode" in line for line in ranks[0]["said"])
    assert all(0 < norm < 1e6 for rank in ranks for _, norm in rank["reports"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("async after Adam", "the checkpoint is not of async_1f1b: gradient norms of other stages, and late gradients of tied embeddings"),
        ("both after Adam", "the checkpoint has no states of BasisRotation (another optimizer saved it): momenta and bases start anew"),
    ],
)
def test_takes_over_from_adam(results, name, line):
    ranks = of(results, name)
    assert any(said.startswith(line) for said in ranks[0]["said"])
    last = [rank["reports"] for rank in ranks if rank["reports"][0][0]]
    before = [rank["reports"] for rank in of(results, "saves of Adam") if rank["reports"][0][0]]
    assert last[0][0][0] == before[0][0][0]  # the first step has the same weights
