"""Experts spread over ranks under ZeRO, each in the data-parallel group of the ranks that hold it: DeepSpeed's MoE layers and its AutoEP.

Refreshes are not staggered here: how they are spread depends on how many matrices a rank has.
"""

import re

import pytest
import torch
from zero_cases import FP32_SUMS, cases
from zero_results import bitwise, distance, run_zero

MAX_DISTANCE = 1e-2  # relative to the movement; measured: at most 1e-4
RANKS = 4
LAYER = {"mixture": "moe", "params": {"stagger": False}}
SPREAD = {**LAYER, "mixture": "moe over 2 ranks"}
REPLACED = {"mixture": "replaced", "params": {"stagger": False}, "config": {"expert_parallel.autoep_size": 1}}
REPLACED_AND_SPREAD = {**REPLACED, "config": {"expert_parallel.autoep_size": 2}}
# An element of an expert's gradient, on one rank
BAD = {"3": ["blocks.1.mixture.deepspeed_moe.experts.deepspeed_experts.0.0.weight", float("inf")]}

CASES = [
    *cases("layer", (0,), **LAYER),
    *cases("spread", (1, 2), like="layer-0", **SPREAD),
    *cases("spread-bf16", (1,), precision="bf16", groups="two", **SPREAD),
    *cases("spread-bf16-fp32-sums", (1,), precision="bf16", config=FP32_SUMS, groups="two", **SPREAD),
    *cases("spread-bad", (1,), spoil=BAD, **SPREAD),
    *cases("spread-without-bad", (1,), leave_out=[3], **SPREAD),
    *cases("replaced", (0,), **REPLACED),
    *cases("replaced-and-spread", (1, 3), like="replaced-0", **REPLACED_AND_SPREAD),
    *cases("refused", (0,), refused=True, **SPREAD),
]
LONG = [
    *cases("layer", (0, 1, 2), like="layer-0", **LAYER),
    *cases("spread", (1, 2), like="layer-0", **SPREAD),
    *cases("spread-groups", (1, 2), like="spread-groups-1", groups="two", clip=0.1, **SPREAD),
    *cases("spread-balanced", (1, 2), like="layer-0", zero={"round_robin_gradients": True, "parameter_alignment": True}, **SPREAD),
    *cases("spread-bad", (1, 2), like="spread-without-bad-1", spoil=BAD, **SPREAD),
    *cases("spread-without-bad", (1,), leave_out=[3], **SPREAD),
    *cases("replaced", (0, 1, 2, 3), like="replaced-0", **REPLACED),
    *cases("replaced-and-spread", (1, 2, 3), like="replaced-0", **REPLACED_AND_SPREAD),
    *cases("replaced-and-spread-sub-groups", (3,), like="replaced-0", zero={"sub_group_size": 1}, **REPLACED_AND_SPREAD),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_zero(RANKS, CASES, tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def long_results(tmp_path_factory):
    return {ranks: run_zero(ranks, LONG, tmp_path_factory.mktemp(f"experts_{ranks}")) for ranks in (2, RANKS)}


def whole(ranks):
    """One result with all experts under the names that they have where a rank holds all of them."""
    first, second = ranks[:2]
    if all(torch.equal(first["before"][name], second["before"][name]) for name in first["before"]):
        return first
    result = {"before": {}, "weights": {}}
    for kind, weights in result.items():
        for rank, held in enumerate((first[kind], second[kind])):
            for name, weight in held.items():
                path, own, rest = re.fullmatch(r"(.*deepspeed_experts\.)?(\d+)?(.*)", name).groups()
                if path:
                    weights[f"{path}{2 * rank + int(own)}{rest}"] = weight
                elif ".experts." in name:
                    weights[name] = torch.cat([weights[name], weight]) if name in weights else weight
                else:
                    weights[name] = weight
    return result


def check(results, case):
    ranks = results(case["name"])
    assert distance(whole(ranks), whole(results(case["like"]))) <= MAX_DISTANCE
    assert len(ranks) == 2 or bitwise(ranks[:2], ranks[2:])


def liked(cases):
    return [pytest.param(case, id=case["name"]) for case in cases if "like" in case]


@pytest.mark.parametrize("case", liked(CASES))
def test_spread_experts_are_trained_as_where_every_rank_has_all(results, case):
    check(results, case)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, RANKS])
@pytest.mark.parametrize("case", liked(LONG))
def test_spread_experts_are_trained_as_where_every_rank_has_all_in_every_setting(long_results, ranks, case):
    check(long_results[ranks], case)


def test_the_bf16_optimizer_with_experts_is_bitwise_the_zero_optimizer(results):
    ranks = results("spread-bf16-fp32-sums-1")
    assert {rank["wrapper"] for rank in ranks} == {"BF16_Optimizer"} and bitwise(ranks, results("spread-bf16-1"))


def test_a_bad_gradient_of_an_expert_is_skipped_on_all_ranks(results):
    assert bitwise(results("spread-bad-1"), results("spread-without-bad-1"))


def test_every_rank_owns_matrices_of_its_experts(results):
    for name in ("spread-1", "replaced-and-spread-3"):
        assert min(rank["state_bytes"] for rank in results(name)) > 0


def test_spread_experts_without_zero_are_refused(results):
    for rank in results("refused-0"):
        assert "BasisRotation with stage 0 does not go with expert parallelism" in rank["message"]
