"""`ds-basisrot bench optimizer`: fair turns on equal gradients, whole periods, figures that follow from the times it writes."""

import json
import statistics
import sys

import pytest
import torch
from cli_refusal import refusal

from ds_basisrot.bench.contestants import NAMES, VARIANTS, Contestant, contestants
from ds_basisrot.bench.gradients import DECADES, SIGNAL_SHARE, GradientPool
from ds_basisrot.bench.state_size import state_bytes
from ds_basisrot.bench.timing import NotTrained, Timing, measure, rounds_of
from ds_basisrot.cli import main

CPU = torch.device("cpu")
TINY = ("bench", "optimizer", "--width", "16", "--blocks", "2", "--period", "2")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The figures of a run of everybody at a tiny size, and the file's path."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    assert main([*TINY, "--updates", "6", "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.fixture
def no_peers(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)


def test_everybody_is_measured_or_said_to_be_missing(whole_run):
    assert set(whole_run["optimizers"]) | set(whole_run["missing"]) == set(NAMES)
    assert set(whole_run["optimizers"]) >= {*VARIANTS, "AdamW"}


def test_times_are_of_whole_periods_after_the_first_update_and_one_period(whole_run):
    for name, figures in whole_run["optimizers"].items():
        expected = (3, 1) if name == "second-bilateral-T1" else (6, 2)
        assert (len(figures["update_ms"]), len(figures["warm_up_ms"])) == expected
        assert figures["updates"] == expected[0] and figures["first_update_ms"] > 0


def test_figures_follow_from_the_times(whole_run):
    for figures in whole_run["optimizers"].values():
        times = figures["update_ms"]
        period = len(times) // 3
        quietest = [min(times[place::period]) for place in range(period)]
        for kind, expected in (("all", times), ("quiet", quietest)):
            assert figures[kind]["mean_ms"] == pytest.approx(statistics.fmean(expected))
            assert figures[kind]["median_ms"] == pytest.approx(statistics.median(expected))
            assert figures[kind]["median_ms"] <= figures[kind]["p95_ms"] <= figures[kind]["max_ms"] == max(expected)
        if figures["update_flops"] is not None:
            rate = figures["update_flops"] / (figures["quiet"]["mean_ms"] / 1e3)
            assert figures["share_of_peak"] == pytest.approx(rate / whole_run["peak"]["flops_per_s"])
    assert set(whole_run["optimizers"]["AdamW"]) == set(whole_run["optimizers"]["second-auto"])


def test_settings_and_machine_are_written_down(whole_run):
    settings = whole_run["settings"]
    assert settings["block_shapes"] == [[16, 16]] * 4 + [[64, 16], [16, 64]]
    assert (settings["width"], settings["blocks"], settings["updates"], settings["period"], settings["device"]) == (16, 2, 6, 2, "cpu")
    assert whole_run["machine"]["threads"] == torch.get_num_threads()
    assert whole_run["optimizers"]["second-bilateral-T1"]["options"]["refresh_period"] == 1
    assert whole_run["optimizers"]["first-auto"]["options"]["refresh_period"] == 2


def test_adamw_has_two_moments_and_ours_that_much_at_least(whole_run):
    numbers = 2 * 12 * 16 * 16
    optimizers = whole_run["optimizers"]
    assert optimizers["AdamW"]["state_bytes"] == pytest.approx(8 * numbers, abs=4 * 12)  # a step counter for each matrix
    assert optimizers["second-bilateral"]["state_bytes"] > optimizers["first-bilateral"]["state_bytes"] > 8 * numbers
    assert optimizers["second-bilateral"]["state_bytes"] > optimizers["second-bilateral-bf16-states"]["state_bytes"]


def test_ratios_to_soap_are_of_the_same_run(whole_run):
    if "SOAP" in whole_run["missing"]:
        pytest.skip("pytorch-optimizer is not installed")
    optimizers = whole_run["optimizers"]
    for kind in ("all", "quiet"):
        ratio = optimizers["second-bilateral"][kind]["mean_ms"] / optimizers["SOAP"][kind]["mean_ms"]
        assert optimizers["second-bilateral"][kind]["mean_to_soap"] == pytest.approx(ratio)
        assert whole_run["comparisons"]["second-bilateral to SOAP, mean"][kind] == pytest.approx(ratio)
    assert len(whole_run["comparisons"]) == 5


def test_without_peers_a_line_says_what_to_install(capsys, no_peers):
    assert main([*TINY, "--only", "adamw, Soap"]) == 0
    output = capsys.readouterr().out
    assert "AdamW" in output and 'SOAP left out: install the extra "peers"' in output
    assert 'install the extra "peers"' in refusal(capsys, *TINY, "--only", "SOAP,Muon")


def test_json_on_stdout_comes_alone(capsys):
    assert main([*TINY, "--only", "second-auto,AdamW", "--json", "-"]) == 0
    output = capsys.readouterr()
    figures = json.loads(output.out)
    assert list(figures["optimizers"]) == ["second-auto", "AdamW"]
    assert figures["optimizers"]["AdamW"]["all"]["mean_to_soap"] is None
    assert "second-auto" in output.err and "torch" in output.err.splitlines()[-1]


WRONG = {
    ("--only", "second-bilaterl"): "--only: unknown optimizer 'second-bilaterl'; did you mean 'second-bilateral'?",
    ("--only", ","): "--only: names no optimizer",
    ("--updates", "5"): "--updates: must be a multiple of --period (2), so that the mean is over whole periods, got 5; try 6",
    ("--period", "0"): "argument --period: must be a whole number of at least 1",
    ("--width", "wide"): "argument --width: must be a whole number of at least 1",
    ("--device", "gpu"): "--device: cannot use 'gpu'",
    ("--device", "meta"): "--device: cannot use 'meta'",
    ("--json", "/no/such/folder/figures.json"): "--json: cannot write /no/such/folder/figures.json: No such file",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_input_gets_one_line_before_anything_is_measured(capsys, arguments):
    assert WRONG[arguments] in refusal(capsys, *TINY, *arguments)


def test_bench_without_a_subject_gets_one_line(capsys):
    assert "--help" in refusal(capsys, "bench")


def test_the_percentile_interpolates_linearly_between_order_statistics():
    figures = Timing(update_ms=[30.0, 10.0, 20.0]).statistics()
    assert figures["p95_ms"] == pytest.approx(29.0)  # position 0.95 * 2 = 1.9
    assert (figures["mean_ms"], figures["median_ms"], figures["max_ms"]) == (20.0, 20.0, 30.0)


def test_a_disturbance_of_one_period_does_not_touch_the_quiet_figures():
    timing = Timing(periods=3, update_ms=[1.0, 5.0, 900.0, 5.5, 1.5, 700.0])
    assert timing.quiet_statistics()["mean_ms"] == 3.0
    assert timing.quiet_statistics()["max_ms"] == 5.0


def test_rounds_are_the_first_update_a_period_to_warm_up_and_those_that_count():
    always, seldom = Contestant("a", None), Contestant("b", None, every_rounds=3)
    assert rounds_of(always, updates=4, period=2) == [0, 1, 2, 3, 4, 5, 6]
    assert rounds_of(seldom, updates=8, period=4) == [0, 1, 4, 5, 8, 9, 12]


def test_multiply_adds_of_a_variant_are_those_of_its_period():
    (every, tenth), missing = contestants(["second-bilateral-T1", "second-bilateral"], [(8, 8)], period=10)
    assert not missing
    # 4 products of 8^3 to rotate, 2 covariances of 8^3; a refresh: 2 images, 2 QR, 4 products for the momentum, each 8^3
    assert (every.update_madds, tenth.update_madds) == (6 * 512 + 8 * 512, 6 * 512 + 8 * 512 / 10)


def gradients_of(pool, blocks, shape, update):
    buffers = [[torch.empty(shape)] for _ in range(blocks)]
    pool.fill(buffers, update)
    return [block[0] for block in buffers]


def test_gradients_have_a_decaying_spectrum_and_a_share_that_persists():
    pool = GradientPool([(48, 32)], size=5, seed=1, device=CPU)
    now, later = (gradients_of(pool, 1, (48, 32), update)[0] for update in (1, 2))
    singular_values = torch.linalg.svdvals(now)
    assert singular_values[0] / singular_values[-1] > 10 ** (0.8 * DECADES)
    cosine = torch.cosine_similarity(now.flatten(), later.flatten(), dim=0).item()
    assert abs(cosine - SIGNAL_SHARE) < 0.3 and not torch.equal(now, later)


def test_gradients_repeat_after_a_cycle_and_differ_between_blocks():
    pool = GradientPool([(8, 4)], size=3, seed=1, device=CPU)
    first, second = gradients_of(pool, 2, (8, 4), 7)
    assert not torch.equal(first, second)
    assert torch.equal(first, gradients_of(pool, 2, (8, 4), 10)[0])
    assert torch.equal(second, gradients_of(pool, 2, (8, 4), 8)[0])
    assert torch.equal(first, gradients_of(GradientPool([(8, 4)], 3, 1, CPU), 1, (8, 4), 7)[0])


class Recorder(torch.optim.SGD):
    """Keeps the gradients it sees, and spoils them."""

    def __init__(self, weights):
        super().__init__(weights, lr=0.1)
        self.seen = []

    def step(self, closure=None):
        self.seen.append([p.grad.clone() for p in self.param_groups[0]["params"]])
        super().step()
        for p in self.param_groups[0]["params"]:
            p.grad.zero_()


def test_all_see_the_same_gradients_even_after_one_has_spoilt_them():
    recorders = {}

    def contestant(name):
        return Contestant(name, lambda weights: recorders.setdefault(name, Recorder(weights)))

    names = []
    timings = measure([contestant("a"), contestant("b")], [(4, 6)], 2, 2, 2, CPU, seed=0, on_update=names.append)
    assert len(recorders["a"].seen) == len(recorders["b"].seen) == 5 and len(names) == 10
    for ours, theirs in zip(recorders["a"].seen, recorders["b"].seen):
        assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(ours, theirs))
    assert all(len(timing.update_ms) == 2 for timing in timings.values())


@pytest.mark.parametrize(("rate", "fault"), [(0.0, "did not move"), (float("inf"), "are not finite")])
def test_an_optimizer_that_does_not_train_is_named(rate, fault):
    broken = Contestant("broken", lambda weights: torch.optim.SGD(weights, lr=rate))
    with pytest.raises(NotTrained, match=f"broken: its weights {fault}"):
        measure([broken], [(4, 4)], 1, 1, 1, CPU, seed=0, on_update=lambda name: None)


def test_shared_storage_counts_once_and_nested_state_counts():
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight])
    whole = torch.zeros(10)
    half = torch.zeros(2, dtype=torch.bfloat16)
    optimizer.state[weight] = {"a": whole[:4], "b": [whole[4:], half], "c": {"d": (torch.zeros(1),)}, "e": 7}
    assert state_bytes(optimizer) == 40 + 4 + 4
