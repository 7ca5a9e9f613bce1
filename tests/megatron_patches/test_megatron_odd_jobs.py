"""What a script may do in mid-run: it goes on as it should, or says what to do; no stage waits for another in a step."""

import math

import pytest
import torch
from megatron_processes import run_worker


def run(out, processes):
    job = run_worker(processes, "odd_jobs_worker.py", out)
    assert job.returncode == 0, f"{job.stdout[-3000:]}\n{job.stderr[-6000:]}"


def results(out, name):
    """Of each rank."""
    return [torch.load(path) for path in sorted(out.glob(f"{name}_[0-9].pt"))]


def same_weights(first, second):
    return all(torch.equal(a["weights"][name], b["weights"][name]) for a, b in zip(first, second, strict=True) for name in a["weights"])


def moved(result, since="initial"):
    return {name for name, w in result[since].items() if not torch.equal(w, result["weights"][name])}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Results of the jobs of two ranks."""
    out = tmp_path_factory.mktemp("odd_pairs")
    run(out, 2)
    return out


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    """Results of the jobs of four ranks."""
    out = tmp_path_factory.mktemp("odd_squares")
    run(out, 4)
    return out


@pytest.mark.parametrize("name", ["collectives", "collectives_sharded", "collectives_overlapped"])
def test_no_collective_of_a_step_spans_stages(square, name):
    for rank in results(square, name):
        assert rank["calls"]
        assert all(set(ranks) <= set(rank["stage"]) for _, ranks in rank["calls"]), rank["calls"]


STOPS = [  # the request reaches the first stage within P - 1 microbatches; the update that it names is P - 1 microbatches ahead
    ("stops_at_the_last_stage_of_a_replica", 4),
    ("stops_at_the_first_stage", 6),
    ("stops_at_the_last_stage", 7),
    ("stops_across_a_cut", 7),
]


@pytest.mark.parametrize(("name", "updates"), STOPS)
def test_all_stages_stop_after_the_same_update(square, name, updates):
    assert [rank["updates"] for rank in results(square, name)] == 4 * [updates]


def test_a_growing_batch_is_a_cut(square):
    grown, cut = results(square, "grows"), results(square, "grows_with_cuts")
    assert same_weights(grown, cut) and [r["losses"] for r in grown] == [r["losses"] for r in cut]
    assert [len(losses) for losses in grown[3]["losses"]] == [1, 1, 2, 2, 3]
    assert [r["drawn"] for r in grown] == [12, None, None, 9]


@pytest.mark.parametrize("name", ["overlapped", "overlapped_and_aligned", "evaluates_at_odd_moments"])
def test_what_changes_nothing(square, name):
    plain, other = results(square, "plain"), results(square, name)
    assert moved(plain[0]) and same_weights(plain, other) and [r["losses"] for r in plain] == [r["losses"] for r in other]


def test_evaluations_see_the_newest_weights_and_repeat(square):
    for rank in results(square, "evaluates_at_odd_moments")[2:]:
        before, after = rank["before"], rank["after"]
        assert before[0] == before[1] and after[0] == after[1] and sum(after[0]) < sum(before[0])


def test_all_ranks_refuse(square):
    for rank in results(square, "refused_everywhere"):
        assert rank["fp16"].startswith("ConfigError: --fp16: ") and "--bf16" in rank["fp16"]
        assert rank["late"].startswith("ConfigError: --overlap-param-gather: ")
        assert rank["tokens"].startswith("ConfigError: --calculate-per-token-loss: ")


def test_frozen_parameters_stay_and_others_learn(pair):
    for rank in results(pair, "frozen_in_part"):
        frozen = {name for name in rank["initial"] if "layers.0" in name or "word_embeddings" in name}
        assert frozen and moved(rank) == set(rank["initial"]) - frozen


def test_freezing_in_mid_run_wants_a_cut(pair):
    first, last = results(pair, "frozen_in_mid_run")
    assert "megatron_patches.drain()" in first["error"]
    assert all(math.isfinite(loss) for losses in last["losses"] for loss in losses) and moved(first, since="before")


def test_recomputing_with_dropout_learns(pair):
    first, last = results(pair, "recomputed_with_dropout")
    assert len(moved(first)) == len(first["initial"]) and sum(last["losses"][-1]) < sum(last["losses"][0])


def test_weights_that_the_script_changes_are_used_in_the_next_step(pair):
    assert results(pair, "changed_by_the_script")[1]["losses"] == 2 * [pytest.approx(math.log(64))]


def test_shapes_may_change_within_a_step(pair):
    losses = results(pair, "other_shapes")[1]["losses"]
    assert [len(each) for each in losses] == 4 * [2] and all(math.isfinite(loss) for each in losses for loss in each)


def test_another_iterator_wants_a_cut(pair):
    first, last = results(pair, "another_iterator")
    assert "drain()" in first["error"] and "forget_data()" in first["error"]
    assert (first["drawn"], last["drawn"]) == (503, 502)


def test_a_second_configuration_wants_a_cut(pair):
    ranks = results(pair, "applied_again")
    assert all("megatron_patches.drain()" in rank["error"] for rank in ranks) and len(ranks[1]["losses"]) == 4


def test_every_microbatch_of_data_that_end_is_trained(pair):
    first, last = results(pair, "data_that_end")
    assert len(last["losses"]) == 3 and "the data ended" in first["error"]


def test_all_ranks_of_a_stage_know_of_data_that_end_where_one_reads(square):
    ranks = results(square, "data_that_end_where_one_rank_reads")
    assert all("the data ended" in rank["error"] for rank in ranks[:2])
    assert all(len(losses) == 2 for rank in ranks[2:] for losses in rank["losses"])
