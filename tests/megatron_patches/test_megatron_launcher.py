"""`python -m megatron_patches` and `megatron_patches.apply`: what a script sees, and what is refused before it runs."""

import json
import os
import subprocess
import sys

import pytest

from ds_basisrot.common.blocks import ConfigError
from megatron_patches import __main__ as launcher
from megatron_patches import job, names, training

ASYNC = {"pipeline": {"schedule": "async_1f1b"}}
OPTIMIZER = {"optimizer": {"type": "BasisRotation"}}

SAYS = "import json, sys; import neighbour; print(json.dumps([__name__, sys.argv, sys.path[0]]))"

APPLIES = f"""
import megatron_patches; megatron_patches.apply({ASYNC!r})
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron_patches.patching import REPLACED

def patched():
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.timers import Timer
    return [hasattr(each, REPLACED) for each in (get_forward_backward_func, get_megatron_optimizer, Timer.start)]

first = patched()
megatron_patches.apply({OPTIMIZER!r})
from megatron.core.pipeline_parallel import get_forward_backward_func
print(first, patched())
"""


@pytest.fixture
def folder(tmp_path):
    """A configuration, a script, and the module next to it that it imports."""
    (tmp_path / "basisrot.json").write_text(json.dumps(ASYNC))
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "neighbour.py").write_text("")
    (tmp_path / "scripts" / "train.py").write_text(SAYS)
    return tmp_path


@pytest.fixture
def in_folder(folder, monkeypatch):
    """The folder as the current one, with what the launcher changes in this process put back."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["launcher"])
    monkeypatch.setattr(sys, "path", ["here", *sys.path])
    return folder


def exit_code(arguments):
    with pytest.raises(SystemExit) as end:
        launcher.main(arguments)
    return end.value.code


def run(folder, *arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True, timeout=120)


FAULTS = [
    ([], "--basisrot-config is missing"),
    (["scripts/train.py"], "--basisrot-config is missing"),
    (["--basisrot-config"], "--basisrot-config is missing"),
    (["--basisrot-config="], "--basisrot-config is missing"),
    (["--basisrot-config", "basisrot.json"], "no script"),
    (["--basisrot-config=basisrot.json", "--local_rank=0"], "no script"),
    (["--basisrot-config", "basisrot.json", "scripts/trian.py"], "no such script: 'scripts/trian.py'"),
    (["--basisrot-confg", "basisrot.json", "scripts/train.py"], "unknown argument '--basisrot-confg'"),
    (["-m", "train"], "unknown argument '-m'"),
]


@pytest.mark.parametrize(("arguments", "words"), FAULTS, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_faults_of_arguments_cost_one_line_and_code_2(in_folder, capsys, arguments, words):
    assert exit_code(arguments) == 2
    line = capsys.readouterr().err
    assert words in line and len(line.splitlines()) == 1


def test_help(capsys):
    assert exit_code(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize("given", [["--basisrot-config", "basisrot.json"], ["--local_rank=1", "--basisrot-config=basisrot.json"],
                                   ["--basisrot-config=basisrot.json", "--local-rank=1"]])  # fmt: skip
def test_a_script_runs_as_if_python_ran_it(in_folder, monkeypatch, capsys, given):
    monkeypatch.setattr(job, "start", lambda config: None)
    launcher.main([*given, "scripts/train.py", "--lr", "1", "--basisrot-config", "its own"])
    name, argv, path = json.loads(capsys.readouterr().out)
    assert (name, argv) == ("__main__", ["scripts/train.py", "--lr", "1", "--basisrot-config", "its own"])
    assert path == str(in_folder / "scripts")


def test_a_real_process(folder):
    ran = run(folder, "-m", "megatron_patches", "--basisrot-config", "basisrot.json", "scripts/train.py", "a")
    assert json.loads(ran.stdout.splitlines()[-1]) == ["__main__", ["scripts/train.py", "a"], str(folder / "scripts")], ran.stderr


def test_a_refused_configuration_costs_one_line_and_code_2(in_folder, capsys):
    (in_folder / "basisrot.json").write_text(json.dumps({"pipeline": {"schedul": "async_1f1b"}}))
    assert exit_code(["--basisrot-config", "basisrot.json", "scripts/train.py"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("megatron_patches: basisrot.json: pipeline: unknown key 'schedul'")
    assert (said.out, len(said.err.splitlines())) == ("", 1)


def test_apply_as_the_first_line_and_another_configuration_in_its_place(folder):
    (folder / "train.py").write_text(APPLIES)
    ran = run(folder, "train.py")
    assert ran.stdout.splitlines()[-1:] == ["[True, True, True] [False, True, False]"], ran.stderr


@pytest.mark.parametrize("version", ["0.15.3", "0.17.0", "0.1", "1.18", "1.0"])
def test_another_version_of_megatron_is_refused(monkeypatch, version):
    monkeypatch.setattr("megatron.core.__version__", version)
    with pytest.raises(ConfigError, match=rf"megatron-core {version}: megatron_patches is made for 0\.16\.x, 0\.18 and newer"):
        names.check()


@pytest.mark.parametrize(("module", "each"), [(module, each) for module, wanted in [*names.CORE, *training.TIMERS] for each in wanted])
def test_a_missing_private_name_is_named(monkeypatch, module, each):
    names.check()
    monkeypatch.delattr(f"{module}.{each}")
    with pytest.raises(ConfigError, match=f"megatron-core 0.16.* has no {module}.{each}: megatron_patches is made for another version"):
        names.check_names((*names.CORE, *training.TIMERS))


def test_a_missing_private_module_is_named():
    with pytest.raises(ConfigError, match="has no megatron.core.no_such_module"):
        names.check_names((("megatron.core.no_such_module", ("name",)),))


def test_megatron_must_be_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ConfigError, match="megatron-core cannot be imported .*: install it"):
        names.check()


def test_nothing_was_applied(monkeypatch):
    import megatron_patches

    monkeypatch.setattr(job, "_job", None)
    for ask in (megatron_patches.drain, megatron_patches.forget_data):
        with pytest.raises(RuntimeError, match="apply"):
            ask()
