"""Patches DeepSpeed when, and only when, a job imports it: post-import hooks on the leaf modules that the plugin changes.

The hooks sit on leaf modules because DeepSpeed imports torch in the middle of its own import: a hook on the top package would fire while
that package is half-initialised. A leaf module is patched right after its own body has run, before anybody can copy names out of it.
"""

import importlib
import logging
import os
from collections.abc import Callable
from types import ModuleType

# module to patch -> "module:function" that patches it; the function gets the imported module
HOOKS = {
    "deepspeed.runtime.engine": "ds_basisrot.deepspeed_plugin.patches:patch_engine",
    "deepspeed.runtime.pipe.engine": "ds_basisrot.deepspeed_plugin.patches:patch_pipeline_engine",
}

activated_by: str | None = None  # the route that installed the hooks first; None: no hooks installed
failures: dict[str, Exception] = {}  # module that could not be patched -> why

logger = logging.getLogger("ds_basisrot")


def install_hooks(by: str) -> None:
    """Arrange that every module of `HOOKS` is patched on import, or at once where it is imported already. Further calls do nothing.

    Args:
        by: the route that asks for it, in words; kept in `activated_by`.

    Raises:
        ImportError: the package wrapt is missing or broken.
    """
    global activated_by
    if activated_by is not None:
        return
    from wrapt import register_post_import_hook

    activated_by = by
    for module_name, target in HOOKS.items():
        register_post_import_hook(_post_import_hook(target), module_name)


def _post_import_hook(target: str) -> Callable[[ModuleType], None]:
    plugin_name, function_name = target.split(":")

    def hook(module: ModuleType) -> None:
        # An exception here would break `import deepspeed`, also for the jobs that never use us. It is kept in `failures`, so that
        # what does use us can refuse, and logged.
        try:
            getattr(importlib.import_module(plugin_name), function_name)(module)
        except Exception as error:
            failures[module.__name__] = error
            _warn(module.__name__, error)

    return hook


def _warn(module_name: str, error: Exception) -> None:
    # one process of each node: nodes may have different installations, the processes of one node hardly
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) != "0":
        return
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    logger.warning("ds_basisrot could not patch %s (%s); jobs that do not use ds_basisrot are not affected", module_name, reason)
