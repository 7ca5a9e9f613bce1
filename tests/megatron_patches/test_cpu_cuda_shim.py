"""The stand-in for torch.cuda serves Megatron, tells the packages under test the truth, and runs scripts and modules as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

TESTS = Path(__file__).parents[1]

MOVES = """
import torch
made = torch.zeros(2, device="cuda", pin_memory=True).cuda().to("cuda:0").to(torch.cuda.current_device())
assert made.device.type == "cpu" and not made.is_pinned()
assert torch.nn.Linear(2, 2).cuda().to("cuda").weight.device.type == "cpu"
assert torch.cuda.is_available() and made.bfloat16().type() == "torch.cuda.BFloat16Tensor"
"""

TRUTH = """
import torch
assert not torch.cuda.is_available() and torch.zeros(1).type() == "torch.FloatTensor"
for says_cuda in (lambda: torch.zeros(2, device="cuda"), lambda: torch.zeros(2).cuda(), lambda: torch.zeros(2).to("cuda")):
    try:
        says_cuda()
    except (AssertionError, RuntimeError):
        continue
    raise SystemExit("a product that says cuda got a CPU")
"""


def shim(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "cpu_cuda_shim", *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)


def test_what_says_cuda_stays_on_the_cpu(tmp_path):
    (tmp_path / "script.py").write_text(MOVES)
    job = shim(tmp_path, "script.py")
    assert job.returncode == 0, job.stderr


def test_packages_under_test_are_told_the_truth(tmp_path):
    (tmp_path / "megatron_patches").mkdir()
    (tmp_path / "megatron_patches" / "__init__.py").write_text(TRUTH)
    (tmp_path / "script.py").write_text(MOVES + "import megatron_patches\n")
    job = shim(tmp_path, "script.py")
    assert job.returncode == 0, job.stderr


def test_a_script_and_a_module_get_their_own_arguments(tmp_path):
    (tmp_path / "said.py").write_text("import sys; print(__name__, sys.argv[1:])")
    for target in (["said.py"], ["-m", "said"]):
        job = shim(tmp_path, *target, "-m", "--flag", "1")
        assert job.stdout == "__main__ ['-m', '--flag', '1']\n", job.stderr


def test_what_a_script_spawns_does_not_run_the_script(tmp_path):
    (tmp_path / "script.py").write_text(
        "print('imported', flush=True)\n"
        "if __name__ == '__main__':\n"
        "    import multiprocessing\n"
        "    process = multiprocessing.get_context('spawn').Process(target=print, args=('spawned',))\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    assert shim(tmp_path, "script.py").stdout.split() == ["imported", "spawned"]


def test_data_sets_need_no_compiler(tmp_path):
    script = "from megatron.core.datasets import helpers, utils\nutils.compile_helpers()\nprint(helpers.build_sample_idx.__name__)\n"
    (tmp_path / "script.py").write_text(script)
    job = shim(tmp_path, "script.py")
    assert job.stdout == "build_sample_idx\n", job.stderr


def test_a_missing_script_is_said(tmp_path):
    job = shim(tmp_path)
    assert job.returncode != 0 and job.stderr.startswith("usage: python -m cpu_cuda_shim")
