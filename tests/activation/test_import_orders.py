"""DeepSpeed's modules are patched once, complete, whichever way a script imports them; a patch that fails breaks nothing."""

import pytest

ORDERS = (
    "import torch; import deepspeed",
    "import deepspeed",
    "from deepspeed.runtime.pipe.engine import PipelineEngine",
    "import torch, deepspeed, ds_basisrot",
)

# Stands in for the plugin: says what it was called with and swaps the engine, as a plugin would that subclasses it.
RECORDER = """
import sys
def patch_engine(module):
    print("patched", module.__name__, module.DeepSpeedEngine.__name__, hasattr(sys.modules["deepspeed"], "DeepSpeedEngine"))
def patch_pipeline_engine(module):
    print("patched", module.__name__, module.PipelineEngine.__name__, hasattr(sys.modules["deepspeed"], "PipelineEngine"))
    module.PipelineEngine = type("Patched", (module.PipelineEngine,), {})
"""
SHOW = """
import deepspeed
from deepspeed.runtime.pipe import engine
print(deepspeed.PipelineEngine.__name__, engine.PipelineEngine.__name__)
"""


def replace_plugin(environment, code: str) -> None:
    plugin = environment.site_packages / "ds_basisrot" / "deepspeed_plugin"
    plugin.mkdir(exist_ok=True)
    (plugin / "__init__.py").write_text("")
    (plugin / "patches.py").write_text(code)


@pytest.fixture(scope="module")
def recording(tmp_path_factory, installed):
    environment = installed.copy(tmp_path_factory.mktemp("recording") / "venv")
    replace_plugin(environment, RECORDER)
    return environment


@pytest.mark.parametrize("order", ORDERS)
def test_each_module_is_patched_once_before_deepspeed_copies_names_out_of_it(recording, order):
    lines = recording.run("-c", order + "\n" + SHOW).stdout.splitlines()
    assert [line for line in lines if line.lower().startswith("patched")] == [
        "patched deepspeed.runtime.engine DeepSpeedEngine False",
        "patched deepspeed.runtime.pipe.engine PipelineEngine False",
        "Patched Patched",
    ]


def test_the_switch_leaves_deepspeed_untouched_until_an_explicit_import_patches_it(recording):
    code = "import deepspeed; print('imported'); import ds_basisrot"
    lines = recording.run("-c", code, DS_BASISROT_AUTOLOAD="0").stdout.splitlines()
    start = lines.index("imported")
    assert not any(line.startswith("patched") for line in lines[:start])
    assert lines[start + 1 :] == [
        "patched deepspeed.runtime.engine DeepSpeedEngine True",
        "patched deepspeed.runtime.pipe.engine PipelineEngine True",
    ]


def test_the_real_plugin_patches_both_engines(installed):
    code = """
from deepspeed.runtime.pipe.engine import PipelineEngine
import deepspeed
from ds_basisrot import _activation
def patched(engine):
    return any("ds_basisrot" in getattr(method, "__code__", patched.__code__).co_filename for method in vars(engine).values())
print(_activation.failures, patched(deepspeed.DeepSpeedEngine), patched(PipelineEngine), PipelineEngine is deepspeed.PipelineEngine)
"""
    assert installed.run("-c", code).stdout.splitlines()[-1] == "{} True True True"


SHOW_FAILURES = """
import deepspeed
from ds_basisrot import _activation
print({name: type(error).__name__ for name, error in _activation.failures.items()})
"""


def test_a_plugin_with_a_syntax_error_is_remembered_and_logged_and_breaks_nothing(breakable):
    replace_plugin(breakable, "def broken(:\n")
    result = breakable.run("-c", SHOW_FAILURES, RANK="4", LOCAL_RANK="0")
    assert "{'deepspeed.runtime.engine': 'SyntaxError', 'deepspeed.runtime.pipe.engine': 'SyntaxError'}" in result.stdout
    warnings = [line for line in result.stderr.splitlines() if "could not patch" in line]
    assert ["patch deepspeed.runtime.engine (Syn" in warnings[0], "patch deepspeed.runtime.pipe.engine (Syn" in warnings[1]] == [True, True]
    assert len(warnings) == 2


def test_a_patch_that_refuses_this_deepspeed_leaves_the_other_patch_in_place(breakable):
    replace_plugin(breakable, RECORDER + "def patch_engine(module): raise RuntimeError('cannot\\nfind it')\n")
    result = breakable.run("-c", SHOW_FAILURES)
    assert "patched deepspeed.runtime.pipe.engine" in result.stdout and "{'deepspeed.runtime.engine': 'RuntimeError'}" in result.stdout
    (warning,) = [line for line in result.stderr.splitlines() if "could not patch" in line]
    assert "deepspeed.runtime.engine (RuntimeError: cannot find it)" in warning


def test_only_one_process_of_a_node_logs_a_failed_patch(breakable):
    replace_plugin(breakable, "")
    result = breakable.run("-c", SHOW_FAILURES, RANK="5", LOCAL_RANK="1")
    assert "AttributeError" in result.stdout and "could not patch" not in result.stderr
