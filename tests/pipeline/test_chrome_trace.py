"""Traces are valid JSON when closed, readable when not, cheap to write, and add up when merged."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_basisrot.pipeline import chrome_trace
from ds_basisrot.pipeline.chrome_trace import Writer, merge, rank_file, read, write_simulated
from ds_basisrot.pipeline.schedule import AsyncSchedule
from ds_basisrot.pipeline.timeline import Times, simulate

US = 1000  # ns


def spans(events):
    return [event for event in events if event["ph"] == "X"]


def test_a_closed_trace_is_valid_json_with_names(tmp_path):
    path = rank_file(tmp_path / "runs" / "trace", 3, 1)
    assert path.name == "stage_003-replica_001.trace.json"
    writer = Writer(path, 3, 1)
    writer.span("F", 7, 5_000 * US, 9_000 * US, version=2, note='a "quote"', loss=0.5)
    writer.span("refresh", 7, 9_000 * US, 9_500 * US)
    writer.close()
    events = json.loads(path.read_text())
    names = {event["name"]: event["args"].get("name") for event in events if event["ph"] == "M"}
    assert (names["process_name"], names["thread_name"]) == ("replica 1", "stage 3")
    first, second = spans(events)
    assert first == {
        "name": "F", "ph": "X", "pid": 1, "tid": 3, "ts": 5000, "dur": 4000, "cname": chrome_trace.COLOURS["F"],
        "args": {"microbatch": 7, "version": 2, "note": 'a "quote"', "loss": 0.5},
    }  # fmt: skip
    assert second["name"] == "refresh" and "cname" not in second


def test_an_unclosed_trace_lacks_only_its_bracket(tmp_path):
    writer = Writer(tmp_path / "t", 0, 0)
    assert len(json.loads((tmp_path / "t").read_text() + "]")) == 4
    writer.span("F", 0, 0, US)
    writer.flush()
    writer.span("B", 0, US, 2 * US)
    assert [event["name"] for event in spans(json.loads((tmp_path / "t").read_text() + "]"))] == ["F"]
    writer.close()
    writer.close()
    writer.span("F", 1, 0, US)
    writer.flush()  # nothing is written any more
    assert [event["name"] for event in spans(json.loads((tmp_path / "t").read_text()))] == ["F", "B"]


def test_it_is_written_about_once_a_second_and_when_much_has_gathered(tmp_path, monkeypatch):
    monkeypatch.setattr(chrome_trace, "FLUSH_SPANS", 5)
    writer = Writer(tmp_path / "t", 0, 0)
    now = time.time_ns()
    for microbatch in range(4):
        writer.span("F", microbatch, now, now)
    assert not spans(read(tmp_path / "t"))
    writer.span("F", 4, now, now)
    assert len(spans(read(tmp_path / "t"))) == 5
    writer.span("B", 0, now, now + 2 * chrome_trace.FLUSH_NS)
    assert len(spans(read(tmp_path / "t"))) == 6
    writer.close()


PROGRAM = """
import os, sys, time
from ds_basisrot.pipeline.chrome_trace import Writer
writer = Writer(sys.argv[1], 0, 0)
for microbatch in range(3000):
    writer.span("F", microbatch, microbatch * 1000, microbatch * 1000 + 500)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("ending", ["kill", "exit"])
def test_what_a_job_leaves_behind_is_readable(tmp_path, ending):
    code = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "t"), ending], timeout=60).returncode
    text = (tmp_path / "t").read_text()
    if ending == "kill":
        assert code == -signal.SIGKILL
        written = spans(json.loads(text + "]"))
        assert 3000 - chrome_trace.FLUSH_SPANS <= len(written) < 3000
    else:
        assert code == 0 and len(spans(json.loads(text))) == 3000  # closed by itself


def test_adding_a_span_is_cheap(tmp_path):
    writer = Writer(tmp_path / "t", 0, 0)
    now, number = time.time_ns(), chrome_trace.FLUSH_SPANS - 1
    start = time.process_time()
    for microbatch in range(number):
        writer.span("F", microbatch, now, now, version=3)
    assert (time.process_time() - start) / number < 10e-6  # about 0.6 us; room for busy machines
    writer.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that cannot be written")
def test_a_full_disk_ends_the_trace_and_not_the_job(tmp_path, monkeypatch):
    writer = Writer(tmp_path / "t", 0, 0)
    writer._file.close()
    monkeypatch.setattr(writer, "_file", open("/dev/full", "w"))
    writer.span("F", 0, 0, US)
    with pytest.warns(RuntimeWarning, match="cannot write the trace .*t: No space left on device; it ends here"):
        writer.flush()
    writer.span("F", 1, 0, US)
    writer.close()


def test_a_job_does_not_begin_without_the_trace_it_asks_for(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Writer(tmp_path / "file" / "t", 0, 0)


def test_spans_that_touch_do_not_overlap(tmp_path):
    writer = Writer(tmp_path / "t", 0, 0)
    edges = [1_700_000_000_000_000_000 + 777 * i for i in range(50)]
    for microbatch, (start, end) in enumerate(zip(edges, edges[1:])):
        writer.span("F", microbatch, start, end)
    writer.close()
    written = spans(read(tmp_path / "t"))
    assert all(one["ts"] + one["dur"] == two["ts"] for one, two in zip(written, written[1:]))


def write_rank(folder, stage, replica, *, closed=True):
    writer = Writer(rank_file(folder, stage, replica), stage, replica)
    for m in range(4):
        writer.span("F", m, (10 * m + stage) * US, (10 * m + stage + 2) * US, version=m)
        writer.span("wait", m, (10 * m + stage + 2) * US, (10 * m + stage + 3) * US)
        writer.span("B", m, (10 * m + stage + 3) * US, (10 * m + stage + 7) * US, version=m)
        writer.span("U", m, (10 * m + stage + 7) * US, (10 * m + stage + 8) * US)
    writer.flush()
    if closed:
        writer.close()
    return writer.path


def test_merged_traces_keep_every_event_and_add_up(tmp_path):
    paths = [write_rank(tmp_path, stage, replica) for replica in (0, 1) for stage in (0, 1, 2)]
    paths.append(tmp_path / "simulated.json")
    write_simulated(paths[-1], simulate(AsyncSchedule(2), Times.of(2), 3).lanes)
    lanes = merge(reversed(paths), tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == [event for path in reversed(paths) for event in read(path)]
    names = [(lane.process, lane.stage) for lane in lanes]
    assert names == [*((f"replica {r}", s) for r in (0, 1) for s in (0, 1, 2)), ("simulated", 0), ("simulated", 1)]
    lane = lanes[1]
    assert (lane.total_us, lane.busy_us, lane.us["wait"], lane.events["B"]) == (38, 28, 4, 4)
    assert merge(paths, None) == lanes


def test_the_last_line_of_a_killed_job_may_be_cut_off(tmp_path):
    path = write_rank(tmp_path, 0, 0, closed=False)
    text = path.read_text()
    path.write_text(text[:-5])
    assert len(spans(read(path))) == 15
    path.write_text("")
    assert list(read(path)) == []


@pytest.mark.parametrize(
    "text, line",
    [
        ("[1]", 1),
        ('{"traceEvents": []}', 1),
        ('[\n{"name":"F"\n{"name":"F","ph":"M","pid":0,"tid":0}\n]', 2),
        ('[\n{"name":"F","ph":"X","pid":0,"tid":0},\n{"name":"F","ph":"M","pid":0,"tid":0}\n]', 2),
        ("[\n3,\n4\n]", 2),
    ],
)
def test_other_files_are_refused_with_their_name(tmp_path, text, line):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=f"other.json, line {line}: not a"):
        merge([tmp_path / "other.json"], None)


def test_a_trace_is_not_merged_into_itself(tmp_path):
    path = write_rank(tmp_path, 0, 0)
    with pytest.raises(ValueError, match="is one of the traces to merge"):
        merge([path], path)
    assert len(spans(read(path))) == 16


def test_a_simulated_trace_has_the_same_names_and_arguments_as_a_real_one(tmp_path):
    run = simulate(AsyncSchedule(3), Times.of(3, 1.0, 2.0, 0.25), 4)
    write_simulated(tmp_path / "s", run.lanes)
    events = spans(json.loads((tmp_path / "s").read_text()))
    assert len(events) == sum(map(len, run.lanes))
    assert {event["name"] for event in events} == {"F", "B", "U", "wait"}
    assert all(event["args"].keys() == {"microbatch", "version"} and event["cname"] for event in events)
    backward = next(event for event in events if event["name"] == "B" and event["tid"] == 1)
    span = next(s for s in run.lanes[1] if s.kind == "B")
    assert (backward["ts"], backward["dur"]) == (round(span.start_ms * 1e3), 2000)
