"""Versions of megatron-core belong to families; the newer one, which is stood in for here, has BasisRotation in its registry."""

import argparse
import dataclasses
import sys
import types

import pytest
import torch

from ds_basisrot.common.blocks import ConfigError
from megatron_patches import names, optimizer_names, registry

NEWER = "megatron.core.optimizer.emerging_optimizers"
LAYERS = "megatron.core.optimizer.layer_wise_optimizer"


class Job:
    """Notes what is patched."""

    def __init__(self):
        self.table, self.undo = [], []

    def note(self, place, what, undo):
        self.table.append((place, what))
        self.undo.append(undo)


@pytest.fixture
def newer(monkeypatch):
    """A megatron-core that has the registry, as far as it is touched."""

    @dataclasses.dataclass
    class Entry:
        optimizer_cls: type
        init_state_fn: object
        config_to_kwargs: object
        default_param_overrides: dict

    @dataclasses.dataclass(frozen=True)
    class Key:
        predicate: object

    @dataclasses.dataclass(frozen=True)
    class Predicate:
        name: str
        fn: object

    import megatron.core.optimizer as optimizers

    found = types.ModuleType(NEWER)
    found._EMERGING_OPTIMIZERS, found.EmergingOptimizerEntry, found.HAVE_EMERGING_OPTIMIZERS = {}, Entry, False
    layers = types.ModuleType(LAYERS)
    layers.LayerWiseDistributedOptimizer = type("LayerWiseDistributedOptimizer", (), {})
    layers.is_managed_by_layer_wise_optimizer = lambda p: p.dim() == 2
    for name, module in ((NEWER, found), (LAYERS, layers)):
        monkeypatch.setitem(sys.modules, name, module)
    parts = {"emerging_optimizers": found, "_EMERGING_OPTIMIZERS": found._EMERGING_OPTIMIZERS, "HAVE_EMERGING_OPTIMIZERS": False}
    for name, part in {**parts, "ParamKey": Key, "ParamPredicate": Predicate}.items():
        monkeypatch.setattr(optimizers, name, part, raising=False)
    monkeypatch.setattr("megatron.core.__version__", "0.18.0")
    return found


@pytest.mark.parametrize(
    ("version", "family"),
    [("0.16.0", names.INNER_ADAM), ("0.16.1rc0", names.INNER_ADAM), ("0.18.0", names.REGISTRY), ("0.20.0+d98e8a64", names.REGISTRY)],
)
def test_versions_belong_to_a_family(monkeypatch, version, family):
    monkeypatch.setattr("megatron.core.__version__", version)
    assert names.family() is family
    assert [each.has(version) for each in names.FAMILIES].count(True) == 1


@pytest.mark.parametrize("version", ["0.17.0", "0.15.9", "1.18.0", "unknown"])
def test_other_versions_are_refused_by_every_adapter(monkeypatch, version):
    monkeypatch.setattr("megatron.core.__version__", version)
    for check in (names.check, optimizer_names.check):
        with pytest.raises(ConfigError, match=rf"megatron-core {version}: megatron_patches is made for 0\.16\.x, 0\.18 and newer$"):
            check()


def test_a_registry_that_has_changed_is_refused(newer):
    del newer.EmergingOptimizerEntry
    with pytest.raises(ConfigError, match=f"megatron-core 0.18.0 has no {NEWER}.EmergingOptimizerEntry"):
        registry.enter(Job(), dict)


def test_the_entry(newer):
    job, options = Job(), {"lr": 0.1, "weight_decay": 0.01, "refresh_period": 2}
    registry.enter(job, lambda config: options)
    entry = newer._EMERGING_OPTIMIZERS[registry.NAME]
    matrix, bias = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3))
    waiting = entry.optimizer_cls([{"params": [matrix], "max_lr": 0.1}], **entry.config_to_kwargs(None, [], None))
    assert (waiting.options, waiting.param_groups[0]["lr"], waiting.param_groups[0]["max_lr"]) == (options, 0.1, 0.1)
    with pytest.raises(RuntimeError, match="get_megatron_optimizer"):
        waiting.step()
    ((key, override),) = entry.default_param_overrides.items()
    assert override == {"optimizer": "adam"} and key.predicate.fn(bias) and not key.predicate.fn(matrix)
    assert job.table == [(f"{NEWER}._EMERGING_OPTIMIZERS", "entry basis_rotation")]
    job.undo[0]()
    assert newer._EMERGING_OPTIMIZERS == {}


def test_it_is_built_without_the_package_of_the_others(newer):
    import megatron.core.optimizer as optimizers

    with pytest.raises(ZeroDivisionError), registry.usable():
        assert optimizers.HAVE_EMERGING_OPTIMIZERS
        raise ZeroDivisionError
    assert not optimizers.HAVE_EMERGING_OPTIMIZERS


def test_the_flag_takes_the_name():
    def add_megatron_arguments(parser):
        parser.add_argument("--optimizer", choices=["adam", "sgd"], default="adam")
        return parser

    parser = registry._wrap_arguments(add_megatron_arguments)(argparse.ArgumentParser())
    assert parser.parse_args(["--optimizer", "basis_rotation"]).optimizer == "basis_rotation"
    assert parser.parse_args([]).optimizer == "adam"


def test_distribution_by_layers_is_found_however_deep(newer):
    by_layers = sys.modules[LAYERS].LayerWiseDistributedOptimizer()
    chain = types.SimpleNamespace(chained_optimizers=[types.SimpleNamespace(), types.SimpleNamespace(chained_optimizers=[by_layers])])
    assert registry.is_layer_wise(chain) and not registry.is_layer_wise(types.SimpleNamespace())


FAULTS = [
    ({"bf16": False}, {}, "needs --bf16"),
    ({}, {"allreduce": False}, "does not go with expert parallelism"),
    ({"overlap_param_gather": True}, {}, "--overlap-param-gather: not possible"),
]


@pytest.mark.parametrize(("options", "marks", "words"), FAULTS)
def test_faults_of_distribution_by_layers(options, marks, words):
    model = torch.nn.Linear(2, 2)
    for name, mark in marks.items():
        setattr(model.weight, name, mark)
    plain = {"use_layer_wise_distributed_optimizer": True, "bf16": True, "overlap_param_gather": False}
    with pytest.raises(ConfigError, match=words) as error:
        registry.check_layer_wise(types.SimpleNamespace(**{**plain, **options}), [model])
    assert "--optimizer adam" in str(error.value) and len(str(error.value).splitlines()) == 1
    registry.check_layer_wise(types.SimpleNamespace(**{**plain, **options, "use_layer_wise_distributed_optimizer": False}), [model])
    registry.check_layer_wise(types.SimpleNamespace(**plain), [torch.nn.Linear(2, 2)])
