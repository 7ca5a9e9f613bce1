"""`python -m ds_basisrot.run` activates ds_basisrot, then behaves like `python script.py` or `python -m module`."""

import pytest

REPORT = """
import sys
from ds_basisrot import _activation
print(__name__, sys.modules["__main__"].__dict__ is globals(), sys.argv[1:], _activation.activated_by is not None, "torch" in sys.modules)
print(sys.argv[0]); print(sys.path[0])
import neighbour
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a script, the module next to it that it imports, and a package."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "train.py").write_text(REPORT)
    (folder / "neighbour.py").write_text("")
    (folder / "exits.py").write_text("raise SystemExit(7)")
    (folder / "imports_missing.py").write_text("import no_such_dependency")
    return folder


def test_a_script_runs_as_main_with_its_own_arguments_and_path(installed, folder):
    result = installed.run("-m", "ds_basisrot.run", folder / "train.py", "--lr", "1", "-m")
    script = str(folder / "train.py")
    assert result.stdout.splitlines() == ["__main__ True ['--lr', '1', '-m'] True False", script, str(folder)]


def test_a_module_runs_as_main_with_its_own_arguments(installed, folder):
    code = ("-m", "ds_basisrot.run", "-m", "train", "a", "b")
    result = installed.run(*code, PYTHONPATH=str(folder))
    assert result.stdout.splitlines()[:2] == ["__main__ True ['a', 'b'] True False", str(folder / "train.py")]


@pytest.mark.parametrize("option", ["--local_rank=3", "--local-rank=3"])
def test_the_rank_that_a_launcher_puts_in_front_reaches_the_script(installed, folder, option):
    result = installed.run("-m", "ds_basisrot.run", option, folder / "train.py", "a")
    assert result.stdout.splitlines()[0] == f"__main__ True ['{option}', 'a'] True False"


def test_the_scripts_own_exit_code_comes_through(installed, folder):
    installed.run("-m", "ds_basisrot.run", folder / "exits.py", expect_code=7)
    installed.run("-m", "ds_basisrot.run", "-m", "exits", expect_code=7, PYTHONPATH=str(folder))


@pytest.mark.parametrize("arguments", [(), ("-m",), ("--what", "x"), ("missing.py",), ("-m", "missing"), ("-m", "missing.child")])
def test_nothing_to_run_costs_one_line_and_exit_code_2(installed, arguments):
    result = installed.run("-m", "ds_basisrot.run", *arguments, expect_code=2)
    assert len(result.stderr.splitlines()) == 1 and ("usage:" in result.stderr or "missing" in result.stderr)


def test_an_import_error_of_the_script_itself_is_shown_as_it_is(installed, folder):
    result = installed.run("-m", "ds_basisrot.run", "-m", "imports_missing", expect_code=1, PYTHONPATH=str(folder))
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'no_such_dependency'\n")
