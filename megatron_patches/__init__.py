"""Basis rotation and no-flush pipelines for Megatron pretraining scripts that are not edited.

    torchrun ... -m megatron_patches --basisrot-config basisrot.json pretrain_gpt.py <the script's own arguments>

or, as the first line of a script:

    import megatron_patches; megatron_patches.apply("basisrot.json")
"""

from typing import Any

__all__ = ["apply", "drain", "forget_data"]


def apply(config: Any) -> None:
    """Patch Megatron as a configuration says, before it is used. A later call takes the place of an earlier one.

    Args:
        config: path of a JSON or YAML file, or a mapping of what stands in one.

    Raises:
        ConfigError: the file, or this Megatron, cannot be used; one line that says why.
    """
    from . import names

    names.check()
    from .job import start

    start(config)


def drain() -> None:
    """Drop what is in flight, on all ranks: before the model is saved or changed by hand. Its data is kept."""
    from .job import current

    current().drain()


def forget_data() -> None:
    """After `drain()`, on all ranks: give up what was read ahead of another data iterator."""
    from .job import current

    current().forget_data()
