"""BasisRotation in DeepSpeed's own pipelines: ZeRO 1 and every bf16 wrapper train bitwise as what they wrap."""

import pytest
from processes import run_cases
from simulate import load
from zero_cases import FP32_SUMS
from zero_results import bitwise

BF16 = {"bf16.enabled": True}
# Name -> wrapper, configuration, and the case to be equal to
KINDS = {
    "zero-0": ("BasisRotation", {}, "zero-0"),
    "zero-1": ("DeepSpeedZeroOptimizer", {"zero_optimization.stage": 1}, "zero-0"),
    "bf16-zero-0": ("BF16_Optimizer", BF16, "bf16-zero-0"),
    "bf16-zero-1": ("DeepSpeedZeroOptimizer", {"zero_optimization.stage": 1, **BF16}, "bf16-zero-0"),
    "bf16-zero-1-fp32-sums": ("BF16_Optimizer", {"zero_optimization.stage": 1, **BF16, **FP32_SUMS}, "bf16-zero-0"),
}
STAGES = (1, 2, 4)
COMMON = {"schedule": "1f1b", "optimizer": "BasisRotation", "gas": 2, "updates": 8}
CASES = [
    {"name": f"{kind}-{stages}", "stages": stages, "config": config, **COMMON}
    for stages in STAGES
    for kind, (_, config, _) in KINDS.items()
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("zero_pipelines")
    run_cases(4, CASES, out)
    return lambda name: load(out, name)


@pytest.mark.full
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_wrappers_train_as_what_they_wrap(results, kind, stages):
    wrapper, _, reference = KINDS[kind]
    ranks = results(f"{kind}-{stages}")
    assert {rank["wrapper"] for rank in ranks} == {wrapper} and bitwise(ranks, results(f"{reference}-{stages}"))
    assert sum(rank["losses"][-1] for rank in ranks) < 0.7 * sum(rank["losses"][0] for rank in ranks)
