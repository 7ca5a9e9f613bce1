"""`ds-basisrot timeline`: text, table, picture, trace and figures of a simulated pipeline; traces of a real one merged; clear refusals."""

import json

import pytest
from cli_refusal import refusal

from ds_basisrot.cli import main
from ds_basisrot.pipeline.chrome_trace import Writer, rank_file


def rows(text):
    """The numbers in the table's rows, by stage."""
    lines = [line.split() for line in text.splitlines()]
    return {int(line[0]): line[1:] for line in lines if len(line) > 6 and line[0].isdigit() and line[1][0].isdigit()}


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_it_shows_one_row_per_stage_and_what_each_pays(capsys):
    assert main(["timeline", "--stages", "4", "--gas", "2", "--calls", "3"]) == 0
    schedule, table = capsys.readouterr().out.split("\n\n", 1)
    lanes = [line for line in schedule.splitlines() if line.startswith("stage")]
    assert [lane.split()[1].rstrip("|") for lane in lanes] == ["0", "1", "2", "3"]
    assert all("B5*" in lane and "B6" not in lane for lane in lanes)
    assert rows(table) == {
        0: ["3", "1.5", "0.0", "%", "3", "4", "3"],
        1: ["2", "1", "0.0", "%", "2", "3", "3"],
        2: ["1", "0.5", "0.0", "%", "2", "2", "3"],
        3: ["0", "0", "0.0", "%", "0", "1", "3"],
    }
    assert "3 ms per microbatch, efficiency 100.0 %" in table


def test_two_calls_are_shown_as_text_by_default(capsys):
    assert main(["timeline", "--stages", "2"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert (first, second) == ("stage 0  |   F0   F1    .  B0*   F2  B1*", "stage 1  |    .   F0  B0*   F1  B1*")


def test_a_flush_is_shown_beside_it(capsys):
    assert main(["timeline", "--stages", "4", "--gas", "9", "--schedule", "1f1b"]) == 0
    out = capsys.readouterr().out
    assert rows(out)[0] == ["0", "0", "25.0", "%", "0", "4", "3"]
    assert "4 ms per microbatch, efficiency 75.0 %" in out


def test_uneven_stages_and_stashed_bytes(capsys, tmp_path):
    arguments = ["--forward-ms", "1,2,1", "--backward-ms", "2,3,2", "--weight-bytes", "1e9,2e9,3e9", "--update-ms", "0.5"]
    assert main(["timeline", "--stages", "3", *arguments, "--json", str(tmp_path / "f.json")]) == 0
    out = capsys.readouterr().out
    assert rows(out)[0][4:7] == ["3", "3.00", "GB"] and rows(out)[1][4:7] == ["2", "4.00", "GB"]
    assert "stashed weights of all stages: 7.00 GB" in out and "work of the slowest stage, 1" in out
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["period_ms"] == pytest.approx(5.5) and figures["efficiency"] == pytest.approx(1)
    assert figures["times"]["forward_ms"] == [1, 2, 1]
    assert [stage["stash_bytes"] for stage in figures["per_stage"]] == [3e9, 4e9, 0]
    assert [stage["versions"] for stage in figures["per_stage"]] == [3, 2, 0]
    assert figures["per_stage"][2]["bubble"] == pytest.approx(1 - 3.5 / 5.5)


def test_the_figures_are_those_of_the_steady_state_whatever_is_shown(capsys):
    tables = []
    for calls in ("1", "4", "40"):
        assert main(["timeline", "--stages", "4", "--latency-ms", "1", "--calls", calls]) == 0
        tables.append(rows(capsys.readouterr().out))
    assert tables[0] == tables[1] == tables[2] and tables[0][0][2] == "33.3"


def test_json_on_stdout_leaves_the_tables_to_stderr(capsys):
    assert main(["timeline", "--stages", "2", "--json", "-"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["stages"] == 2 and "stage 0" in output.err


def test_hundreds_of_stages_have_no_text_and_a_short_table_with_the_slowest(capsys, tmp_path):
    forward = ",".join("1.5" if stage == 105 else "1" for stage in range(200))
    assert main(["timeline", "--stages", "200", "--gas", "50", "--forward-ms", forward, "--json", str(tmp_path / "f.json")]) == 0
    out = capsys.readouterr().out
    table = rows(out)
    assert "200 stages are too many to show as text" in out and "F0" not in out
    assert len(table) == 20 and {0, 105, 199} <= table.keys()
    assert "20 of 200 stages are shown; --json has all" in out
    assert len(json.loads((tmp_path / "f.json").read_text())["per_stage"]) == 200


@pytest.mark.parametrize("stages, arguments", [(1, []), (4, ["--calls", "6"]), (80, ["--gas", "8"])])
def test_the_picture_is_a_png_of_bounded_size(capsys, tmp_path, stages, arguments):
    path = tmp_path / "out.png"
    assert main(["timeline", "--stages", str(stages), *arguments, "--picture", str(path)]) == 0
    width, height = png_size(path)
    assert width == 1650 and 300 < height < 1500
    out = capsys.readouterr().out
    assert f"picture: {path}" in out and "F0" not in out


def test_the_trace_holds_the_calls_asked_for(capsys, tmp_path):
    path = tmp_path / "out.json"
    assert main(["timeline", "--stages", "3", "--gas", "2", "--calls", "4", "--update-ms", "1", "--trace", str(path)]) == 0
    spans = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    assert f"trace: {path}" in capsys.readouterr().out
    for stage in range(3):
        names = [event["name"] for event in spans if event["tid"] == stage]
        assert (names.count("B"), names.count("U"), names.count("F")) == (8, 4, 8 + 2 - stage)


def write_run(folder):
    for stage in (0, 1):
        writer = Writer(rank_file(folder, stage, 0), stage, 0)
        for m in range(5):
            start = 1_700_000_000_000_000_000 + m * 10_000_000 + stage * 1_000_000
            for name, begin, end in (("F", 0, 2), ("wait", 2, 3), ("B", 3, 7), ("U", 7, 8), ("wait", 8, 10)):
                writer.span(name, m, start + begin * 1_000_000, start + end * 1_000_000, version=m)
        writer.close()


def test_a_real_runs_traces_are_merged_and_summed_up(capsys, tmp_path):
    write_run(tmp_path / "run")
    out = tmp_path / "run" / "merged.json"
    for _ in range(2):  # the merged file in the same folder is not merged again
        assert main(["timeline", "--merge", str(tmp_path / "run"), "--trace", str(out), "--json", str(tmp_path / "f.json")]) == 0
        events = json.loads(out.read_text())
        assert len([event for event in events if event["ph"] == "X"]) == 50
    printed = capsys.readouterr().out
    assert "2 traces in" in printed and f"trace: {out}" in printed
    lines = [line.split() for line in printed.splitlines() if line.split()[:2] == ["replica", "0"]]
    assert lines[1] == "replica 0 1 0.05 5 10 20.0 % 40.0 % 10.0 % 70.0 % 30.0 % 0.0 %".split()
    lanes = json.loads((tmp_path / "f.json").read_text())["lanes"]
    assert [lane["stage"] for lane in lanes] == [0, 1] and lanes[0]["shares"]["wait"] == pytest.approx(0.3)


@pytest.mark.parametrize("option", ["--stages", "--gas", "--calls"])
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_it_names_the_option_that_is_no_count(capsys, option, value):
    line = refusal(capsys, "timeline", *([] if option == "--stages" else ["--stages", "2"]), f"{option}={value}")
    assert f"argument {option}: must be a whole number of at least 1, not {value!r}" in line


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--forward-ms", "1,2"), "--forward-ms: give one number, or one for each of the 3 stages, got 2"),
        (("--weight-bytes", "1,2,3,4"), "--weight-bytes: give one number, or one for each of the 3 stages, got 4"),
        (("--backward-ms", "0"), "--backward-ms: must be finite and > 0, got 0"),
        (("--update-ms", "1,x,2"), "--update-ms: must be a number of at least 0"),
        (("--forward-ms=-1",), "--forward-ms: must be a number of at least 0"),
        (("--latency-ms", "1,1,1"), "--latency-ms: must be a number of at least 0"),
        (("--latency-ms", "inf"), "--latency-ms: must be a number of at least 0"),
        (("--schedule", "gpipe"), "--schedule: invalid choice: 'gpipe'"),
        (("--picture", "out.pdf"), "--picture: writes a PNG; the file's name must end in .png, not 'out.pdf'"),
        (("--picture", "/no/such/folder/out.png"), "--picture: cannot write /no/such/folder/out.png: No such file"),
        (("--trace", "/no/such/folder/out.json"), "--trace: cannot write /no/such/folder/out.json: No such file"),
        (("--json", "/no/such/folder/out.json"), "--json: cannot write"),
        (("--gas", "1000000"), "--stages, --gas, --calls: "),
        (("--merge", "."), "not allowed with"),
    ],
)
def test_wrong_arguments_of_a_simulation_get_one_line(capsys, arguments, message):
    assert message in refusal(capsys, "timeline", "--stages", "3", *arguments)


def test_wrong_arguments_of_a_merge_get_one_line(capsys, tmp_path):
    assert "one of the arguments --stages --merge is required" in refusal(capsys, "timeline")
    assert f"--merge: {tmp_path} has no traces" in refusal(capsys, "timeline", "--merge", tmp_path)
    assert "is not a folder" in refusal(capsys, "timeline", "--merge", tmp_path / "missing")
    rank_file(tmp_path, 0, 0).write_text("[\n")
    assert "nothing has happened in the traces" in refusal(capsys, "timeline", "--merge", tmp_path)
    write_run(tmp_path)
    for option, value in (("--gas", "2"), ("--forward-ms", "1"), ("--picture", str(tmp_path / "new.png"))):
        assert f"{option}: belongs to a simulation" in refusal(capsys, "timeline", "--merge", tmp_path, option, value)
    assert not (tmp_path / "new.png").exists()
    line = refusal(capsys, "timeline", "--merge", tmp_path, "--trace", rank_file(tmp_path, 0, 0))
    assert "is one of the traces to merge" in line
    rank_file(tmp_path, 1, 0).write_text("{}")
    assert "stage_001-replica_000.trace.json, line 1: not a trace" in refusal(capsys, "timeline", "--merge", tmp_path)
