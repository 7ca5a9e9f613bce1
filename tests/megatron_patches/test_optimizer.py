"""BasisRotation inside Megatron's optimizers equals a plain loop over the same matrices, however Megatron slices them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

HERE = Path(__file__).parent
PORT = int(os.environ.get("MEGATRON_OPTIMIZER_TEST_PORT", "29940"))

# Processes -> cases of one world; those of four are in the long matrix.
EQUAL_TO_A_PLAIN_LOOP = {
    1: ["plain 1", "clipped 1", "bf16 1", "distributed 1", "experts 1"],
    2: [
        "plain dp2",
        "distributed dp2",
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
OTHERS = {1: [], 2: [], 4: []}


def run(processes: int, folder: Path) -> list[dict]:
    names = EQUAL_TO_A_PLAIN_LOOP[processes] + OTHERS[processes]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", f"--master_port={PORT + processes}"]
    paths = [str(HERE), str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*command, str(HERE / "optimizer_worker.py"), str(folder), *names],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
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
