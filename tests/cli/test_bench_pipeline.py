"""`ds-basisrot bench pipeline`: a plain DeepSpeed job, figures that follow from its times, and jobs that fail or hang."""

import json
import os
import sys
import time

import pytest
from cli_refusal import refusal

from ds_basisrot.bench import pipelines
from ds_basisrot.bench.pipelines import Case, JobFailed, Setting, expected_s, flushing_bound, measure
from ds_basisrot.cli import main

SHORT = ("bench", "pipeline", "--stages", "2", "--forward-ms", "5", "--backward-ms", "10", "--microbatches", "12")
DEFAULT = Setting(stages=8, forward_ms=50, backward_ms=100, microbatches=40)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The figures of one job with both schedules and two optimizers."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    assert main([*SHORT, "--gas", "1", "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.fixture
def no_job(monkeypatch):
    """Times as if they had been measured; returns what would have been run."""
    asked = []

    def measured(setting, cases):
        asked.append((setting, cases))
        return [20.0 * (1 + index) for index in range(len(cases))]

    monkeypatch.setattr(pipelines, "measure", measured)
    return asked


def job_that(monkeypatch, tmp_path, *lines):
    """Replaces the job by a script of these lines."""
    script = tmp_path / "job.py"
    script.write_text("\n".join(lines))
    monkeypatch.setattr(pipelines, "JOB", script)


def test_figures_follow_from_the_times(whole_run):
    assert len(whole_run["cases"]) == 4
    for case in whole_run["cases"]:
        assert case["efficiency"] == pytest.approx(15 / case["ms_per_microbatch"])
        assert case["flushing_bound"] == 1 / 2
    assert whole_run["settings"] == {"stages": 2, "forward_ms": 5, "backward_ms": 10, "microbatches": 12}


def test_stages_sleep_as_long_as_they_should(whole_run):
    for case in whole_run["cases"]:
        assert case["efficiency"] < (case["flushing_bound"] if case["schedule"] == "1f1b" else 1)


def test_the_json_alone_selects_the_schedule(whole_run):
    assert Case("1f1b", 2, "SGD").ds_config() == {**Case("async_1f1b", 2, "SGD").ds_config(), "pipeline": {"schedule": "1f1b"}}
    assert "import ds_basisrot" not in pipelines.JOB.read_text() and "from ds_basisrot" not in pipelines.JOB.read_text()
    fastest = {s: max(case["efficiency"] for case in whole_run["cases"] if case["schedule"] == s) for s in pipelines.SCHEDULES}
    assert fastest["async_1f1b"] > fastest["1f1b"]


def test_a_schedule_that_flushes_is_measured_for_as_long_with_fewer_microbatches():
    flushing, asynchronous = Case("1f1b", 8, "SGD"), Case("async_1f1b", 8, "SGD")
    assert (flushing.slots(DEFAULT), asynchronous.slots(DEFAULT)) == (15, 8)
    assert (flushing.calls(DEFAULT), asynchronous.calls(DEFAULT)) == (3, 5)
    assert (flushing.warm_up_calls(DEFAULT), asynchronous.warm_up_calls(DEFAULT)) == (1, 2)
    assert [flushing_bound(gas, stages) for gas, stages in ((1, 8), (8, 8), (3, 1))] == [1 / 8, 8 / 15, 1]


def test_every_combination_is_measured_in_order(no_job):
    assert main([*SHORT, "--gas", "1,2,1", "--json", "-"]) == 0
    ((_, cases),) = no_job
    assert cases == [Case(s, gas, o) for s in ("async_1f1b", "1f1b") for gas in (1, 2) for o in ("SGD", "BasisRotation")]


def test_the_default_leaves_time_to_start_within_two_minutes(no_job):
    assert main(["bench", "pipeline"]) == 0
    ((setting, cases),) = no_job
    assert setting == DEFAULT and len(cases) == 8
    assert expected_s(setting, cases) < 80


def test_the_table_shows_times_shares_and_the_bound(capsys, no_job):
    assert main([*SHORT, "--gas", "4", "--optimizers", "nadam, SGD", "--schedules", "1f1b"]) == 0
    output = capsys.readouterr()
    rows = [line.split() for line in output.out.splitlines() if line.strip().startswith("1f1b")]
    assert rows == [["1f1b", "NAdam", "4", "20.0", "0.750", "0.800"], ["1f1b", "SGD", "4", "40.0", "0.375", "0.800"]]
    assert "2 cases on 2 processes" in output.err


def test_json_on_stdout_comes_alone(capsys, no_job):
    assert main([*SHORT, "--json", "-"]) == 0
    output = capsys.readouterr()
    assert len(json.loads(output.out)["cases"]) == 8
    assert "async_1f1b" in output.err


WRONG = {
    ("--schedules", "async"): "--schedules: unknown schedule 'async'; did you mean 'async_1f1b'?",
    ("--optimizers", "Lion"): "--optimizers: unknown optimizer 'Lion'",
    ("--optimizers", ""): "--optimizers: names no optimizer; valid: SGD, BasisRotation, AdamW, NAdam",
    ("--gas", "1,0"): "argument --gas: must be a whole number of at least 1, not '0'",
    ("--stages", "0"): "argument --stages: must be a whole number of at least 1",
    ("--forward-ms", "0"): "argument --forward-ms: must be a number of milliseconds above 0 and at most 60000, not '0'",
    ("--backward-ms", "nan"): "argument --backward-ms: must be a number of milliseconds",
    ("--json", "/no/such/folder/figures.json"): "--json: cannot write /no/such/folder/figures.json: No such file",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_input_gets_one_line_before_anything_is_started(capsys, no_job, arguments):
    assert WRONG[arguments] in refusal(capsys, *SHORT, *arguments)
    assert not no_job


def test_without_deepspeed_a_line_says_what_to_install(capsys, monkeypatch, no_job):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert 'install the extra "deepspeed"' in refusal(capsys, *SHORT)
    assert not no_job


def test_a_job_that_fails_says_why_with_the_end_of_its_own_stderr(capsys, monkeypatch, tmp_path):
    job_that(monkeypatch, tmp_path, "raise SystemExit('no stage today')")
    assert main(list(SHORT)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "ds-basisrot bench: error: the job ended with exit code 1; the last of its stderr:\n" in output.err
    assert "no stage today" in output.err and "ChildFailedError" not in output.err


@pytest.mark.full
def test_a_job_that_hangs_is_ended_with_all_its_processes(monkeypatch, tmp_path):
    pids = [tmp_path / f"{rank}.pid" for rank in range(2)]
    job_that(
        monkeypatch, tmp_path, "import os, sys, time", "from pathlib import Path",
        f"Path({str(tmp_path)!r}, os.environ['RANK'] + '.pid').write_text(str(os.getpid()))",
        "print('still at it', file=sys.stderr, flush=True)", "time.sleep(600)",
    )  # fmt: skip
    start = time.monotonic()
    with pytest.raises(JobFailed, match=r"(?s)did not end within 20 s.*still at it"):
        measure(Setting(2, 5, 10, 12), [Case("1f1b", 1, "SGD")], limit_s=20)
    assert time.monotonic() - start < 60
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_a_job_without_all_results_is_no_success(monkeypatch):
    monkeypatch.setattr(pipelines, "_torchrun", lambda *_: 'loading\n{"ms_per_microbatch": 7.5}\ngoodbye\n')
    case, setting = Case("1f1b", 1, "SGD"), Setting(2, 5, 10, 12)
    assert measure(setting, [case]) == [7.5]
    with pytest.raises(JobFailed, match=r"(?s)with 1 of 2 results.*goodbye"):
        measure(setting, [case, case])
