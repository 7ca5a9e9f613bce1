"""BasisRotation in the registry of optimizers that megatron-core has from 0.18 on: `--optimizer basis_rotation`."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_basisrot.common.blocks import ConfigError

from . import names

if TYPE_CHECKING:
    from .job import Job

NAME = "basis_rotation"

NAMES: names.Table = (
    (
        "megatron.core.optimizer.emerging_optimizers",
        ("_EMERGING_OPTIMIZERS", "EmergingOptimizerEntry", "HAVE_EMERGING_OPTIMIZERS"),
    ),
    ("megatron.core.optimizer", ("_EMERGING_OPTIMIZERS", "HAVE_EMERGING_OPTIMIZERS", "ParamKey", "ParamPredicate")),
    ("megatron.core.optimizer.layer_wise_optimizer", ("LayerWiseDistributedOptimizer", "is_managed_by_layer_wise_optimizer")),
)
SCRIPT_NAMES: names.Table = (("megatron.training.arguments", ("add_megatron_arguments",)),)


class Waiting(torch.optim.Optimizer):
    """What Megatron makes of the entry: it holds Megatron's groups until their parameters are distributed and have float32 copies.

    BasisRotation takes its place then, as it takes an Adam's.

    Args:
        params: Megatron's groups.
        options: of BasisRotation, with Megatron's own learning rate, betas, eps and weight decay.
    """

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, {"lr": options["lr"], "weight_decay": options["weight_decay"]})
        self.options = options

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        """Never called where the patches are applied."""
        raise RuntimeError(f"--optimizer {NAME}: take the optimizer from megatron.core.optimizer.get_megatron_optimizer")


def is_chosen(config: Any) -> bool:
    """Whether an OptimizerConfig names the entry."""
    return config.optimizer == NAME


def enter(job: "Job", to_options: Callable[[Any], Mapping[str, Any]]) -> None:
    """Make `--optimizer basis_rotation` known to megatron-core and, where it is there, to its training script.

    Args:
        to_options: options of BasisRotation for an OptimizerConfig.

    Raises:
        ConfigError: with the name that this megatron-core lacks.
    """
    names.check_names(NAMES)
    from megatron.core.optimizer import ParamKey, ParamPredicate, emerging_optimizers

    others = ParamPredicate(name="not_a_hidden_matrix", fn=_is_for_adam)
    entry = emerging_optimizers.EmergingOptimizerEntry(
        optimizer_cls=Waiting,
        init_state_fn=no_states,
        config_to_kwargs=lambda config, model_chunks, pg_collection: dict(to_options(config)),
        default_param_overrides={ParamKey(predicate=others): {"optimizer": "adam"}},
    )
    emerging_optimizers._EMERGING_OPTIMIZERS[NAME] = entry
    undo = functools.partial(emerging_optimizers._EMERGING_OPTIMIZERS.pop, NAME, None)
    job.note(f"{emerging_optimizers.__name__}._EMERGING_OPTIMIZERS", f"entry {NAME}", undo)


def accept_name(job: "Job") -> None:
    """Let the training script's `--optimizer` take the name."""
    names.check_names(SCRIPT_NAMES)
    import megatron.training.arguments as arguments

    job.replace(arguments, "add_megatron_arguments", _wrap_arguments, f"--optimizer {NAME}")


@contextlib.contextmanager
def usable() -> Iterator[None]:
    """Megatron builds what is in its registry only where the package emerging_optimizers is installed; ours does not need it."""
    import megatron.core.optimizer as optimizers

    installed = optimizers.HAVE_EMERGING_OPTIMIZERS
    optimizers.HAVE_EMERGING_OPTIMIZERS = True
    try:
        yield
    finally:
        optimizers.HAVE_EMERGING_OPTIMIZERS = installed


def is_layer_wise(built: Any) -> bool:
    """Whether any of Megatron's optimizers, however deep, gives each of its parameters to one data-parallel rank."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    inner = getattr(built, "chained_optimizers", ())
    return isinstance(built, LayerWiseDistributedOptimizer) or any(is_layer_wise(each) for each in inner)


def check_layer_wise(config: Any, model_chunks: Any) -> None:
    """Refuse what Megatron's distribution by layers cannot do here.

    Raises:
        ConfigError: the first fault.
    """
    if not config.use_layer_wise_distributed_optimizer:
        return
    if not config.bf16:
        raise ConfigError(f"--use-distributed-optimizer with --optimizer {NAME} needs --bf16; or use --optimizer adam, which is replaced")
    if any(not getattr(p, "allreduce", True) for chunk in model_chunks for p in chunk.parameters()):
        raise ConfigError(
            f"--use-distributed-optimizer with --optimizer {NAME} does not go with expert parallelism; "
            "use --optimizer adam, which is replaced"
        )
    if config.overlap_param_gather:
        raise ConfigError(f"--overlap-param-gather: not possible with --optimizer {NAME}; remove it, or use --optimizer adam")


def no_states(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """In the place of what fills in an optimizer's states."""


def _is_for_adam(parameter: Tensor) -> bool:
    """What the buffers of Megatron's distribution by layers hold elsewhere, and must not be ours."""
    from megatron.core.optimizer.layer_wise_optimizer import is_managed_by_layer_wise_optimizer

    return not is_managed_by_layer_wise_optimizer(parameter)


def _wrap_arguments(native: Callable) -> Callable:
    @functools.wraps(native)
    def add_megatron_arguments(*args: Any, **kwargs: Any) -> Any:
        parser = native(*args, **kwargs)
        for action in parser._actions:
            if "--optimizer" in action.option_strings and action.choices is not None:
                action.choices = [*action.choices, NAME]
        return parser

    return add_megatron_arguments
