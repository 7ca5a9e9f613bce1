"""`import torch` activates an installed ds_basisrot, loads nothing heavy for it, and survives every kind of broken installation."""

import shutil

import pytest

USE_TORCH = "import torch; print(int(torch.ones(3).sum()))"
WARNING = "WARNING: ds_basisrot was not activated"


def package_deleted(site_packages):
    shutil.rmtree(site_packages / "ds_basisrot")
    return "ModuleNotFoundError: No module named 'ds_basisrot'"


def package_emptied(site_packages):
    for file in (site_packages / "ds_basisrot").rglob("*.py"):
        file.unlink()
    return "ImportError"


def package_raises(site_packages):
    panic = "class Panic(BaseException): pass\nraise Panic('first line\\nsecond line')\n"  # not even an Exception
    (site_packages / "ds_basisrot" / "__init__.py").write_text(panic)
    return "Panic: first line second line"


def package_has_syntax_error(site_packages):
    (site_packages / "ds_basisrot" / "_activation.py").write_text("def broken(:\n")
    return "SyntaxError"


def wrapt_missing(site_packages):
    (site_packages / "wrapt").unlink()
    return "ModuleNotFoundError: No module named 'wrapt'"


def wrapt_broken(site_packages):
    (site_packages / "wrapt").unlink()
    (site_packages / "wrapt.py").write_text("import no_such_library\n")
    return "ModuleNotFoundError: No module named 'no_such_library'"


BREAKAGES = (
    package_deleted,
    package_emptied,
    package_raises,
    package_has_syntax_error,
    wrapt_missing,
    wrapt_broken,
)


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_a_broken_installation_costs_one_warning_line_and_nothing_else(breakable, breakage):
    reason = breakage(breakable.site_packages)
    result = breakable.run("-c", USE_TORCH)
    assert result.stdout == "3\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith(WARNING) and reason in line and "DS_BASISROT_AUTOLOAD=0" in line


def test_a_broken_installation_is_harmless_without_stderr_too(breakable):
    package_deleted(breakable.site_packages)
    for no_stderr in ("sys.stderr.close()", "sys.stderr = None"):
        code = f"import sys, ds_basisrot_autoload; {no_stderr}; ds_basisrot_autoload.activate(); print('alive')"
        assert breakable.run("-c", code).stdout == "alive\n"


def test_an_explicit_import_of_a_broken_installation_does_fail(breakable):
    wrapt_missing(breakable.site_packages)
    result = breakable.run("-c", "import ds_basisrot", expect_code=1)
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'wrapt'\n")


def test_import_torch_activates_and_loads_only_the_hooks(installed):
    code = """
import sys, torch
print(sorted(name for name in sys.modules if name.startswith("ds_basisrot")), "pydantic" in sys.modules, "deepspeed" in sys.modules)
from ds_basisrot import _activation
print(_activation.activated_by)
"""
    result = installed.run("-c", code)
    modules = ["ds_basisrot", "ds_basisrot._activation", "ds_basisrot_autoload"]
    assert (result.stdout.splitlines(), result.stderr) == ([f"{modules} False False", "PyTorch's autoload"], "")


def test_the_switch_turns_the_autoload_off(installed):
    code = "import sys, torch; print('ds_basisrot' in sys.modules, 'wrapt' in sys.modules)"
    assert installed.run("-c", code, DS_BASISROT_AUTOLOAD="0").stdout == "False False\n"


@pytest.mark.parametrize(("value", "active"), [("0", False), ("False", False), ("off", False), ("1", True), ("", True)])
def test_the_switch_takes_the_usual_words(installed, value, active):
    code = "import sys, ds_basisrot_autoload as autoload; autoload.activate(); print('ds_basisrot' in sys.modules)"
    assert installed.run("-c", code, DS_BASISROT_AUTOLOAD=value).stdout == f"{active}\n"


def test_an_explicit_import_activates_whatever_the_switch_says_and_leaves_torch_alone(installed):
    code = """
import sys, ds_basisrot
from ds_basisrot import _activation
print(_activation.activated_by, 'torch' in sys.modules)
import torch
_activation.install_hooks("again")
print(_activation.activated_by)
"""
    result = installed.run("-c", code, DS_BASISROT_AUTOLOAD="0")
    assert result.stdout.splitlines() == ["import ds_basisrot False", "import ds_basisrot"]


def test_the_public_names_load_when_first_used(installed):
    code = """
import sys, ds_basisrot
print([name in dir(ds_basisrot) for name in ("BasisRotation", "param_groups")], 'torch' in sys.modules)
from ds_basisrot import BasisRotation, param_groups
import torch
print(issubclass(BasisRotation, torch.optim.Optimizer), callable(param_groups), ds_basisrot.__version__)
try:
    ds_basisrot.no_such_name
except AttributeError as error:
    print(error)
"""
    lines = installed.run("-c", code).stdout.splitlines()
    assert lines[0] == "[True, True] False"
    assert lines[1].startswith("True True 0.")
    assert lines[2] == "module 'ds_basisrot' has no attribute 'no_such_name'"


def test_an_editable_installation_activates_and_has_its_own_copy_of_the_entry_point(editable, checkout):
    code = "import torch, ds_basisrot_autoload, ds_basisrot; print(ds_basisrot_autoload.__file__); print(ds_basisrot.__file__)"
    copy = editable.site_packages / "ds_basisrot_autoload.py"
    assert editable.run("-c", code).stdout.splitlines() == [str(copy), str(checkout / "ds_basisrot" / "__init__.py")]
    assert copy.read_bytes() == (checkout / "ds_basisrot_autoload.py").read_bytes()


def test_an_editable_installation_works_from_the_folder_above_the_checkout(editable, checkout, tmp_path):
    (tmp_path / "ds_basisrot").mkdir()  # as `git clone .../ds_basisrot` leaves it: a folder of the package's name
    code = f"import os; os.chdir({str(tmp_path)!r}); import ds_basisrot; print(ds_basisrot.__file__)"
    assert editable.run("-c", code).stdout == f"{checkout / 'ds_basisrot' / '__init__.py'}\n"


def test_moving_the_checkout_of_an_editable_installation_does_not_break_torch(editable, checkout):
    moved = checkout.with_name("moved")
    checkout.rename(moved)
    try:
        result = editable.run("-c", USE_TORCH)
    finally:
        moved.rename(checkout)
    assert result.stdout == "3\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith(WARNING) and "No module named 'ds_basisrot'" in line
