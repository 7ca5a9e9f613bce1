"""A function is replaced wherever it is bound, once, and comes back where the patches are taken away."""

import functools
import sys
import types

import pytest

from megatron_patches import patching


@pytest.fixture
def modules(monkeypatch):
    """A module with a function, one that imported it by name, one with another function of that name, and one that has none."""

    def function(x):
        """Doubles."""
        return 2 * x

    made = {name: types.ModuleType(name) for name in ("patched_home", "patched_user", "patched_stranger", "patched_bystander")}
    made["patched_home"].function = made["patched_user"].function = function
    made["patched_stranger"].function = lambda x: x
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return types.SimpleNamespace(**{name.removeprefix("patched_"): module for name, module in made.items()}, native=function)


def adds(number):
    def make(native):
        @functools.wraps(native)
        def function(x):
            return native(x) + number

        return function

    return make


def test_every_binding_is_replaced(modules):
    stranger = modules.stranger.function
    assert sorted(patching.replace(modules.home, "function", adds(1))) == ["patched_home", "patched_user"]
    assert modules.home.function is modules.user.function and modules.user.function(3) == 7
    assert modules.stranger.function is stranger and not hasattr(modules.bystander, "function")
    assert (modules.home.function.__name__, modules.home.function.__doc__) == ("function", "Doubles.")


def test_a_second_time_wraps_what_was_there_at_first(modules):
    patching.replace(modules.home, "function", adds(1))
    assert sorted(patching.replace(modules.home, "function", adds(10))) == ["patched_home", "patched_user"]
    assert modules.home.function(3) == modules.user.function(3) == 16


def test_modules_that_import_later_get_the_replacement_and_are_replaced_again(modules):
    patching.replace(modules.home, "function", adds(1))
    modules.bystander.function = modules.home.function
    assert sorted(patching.replace(modules.home, "function", adds(10))) == ["patched_bystander", "patched_home", "patched_user"]
    assert modules.bystander.function(3) == 16


def test_modules_that_answer_anything_are_left_alone(modules, monkeypatch):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise RuntimeError(f"{name} was asked of a lazy module")

    monkeypatch.setitem(sys.modules, "patched_lazy", Lazy("patched_lazy"))
    monkeypatch.setitem(sys.modules, "patched_none", None)
    assert sorted(patching.replace(modules.home, "function", adds(1))) == ["patched_home", "patched_user"]


def test_a_method_is_replaced_once():
    class Owner:
        def method(self, x):
            return 2 * x

    def make(number):
        def wrap(native):
            @functools.wraps(native)
            def method(self, x):
                return native(self, x) + number

            return method

        return wrap

    patching.replace_method(Owner, "method", make(1))
    patching.replace_method(Owner, "method", make(10))
    assert Owner().method(3) == 16 and Owner.method.__name__ == "method"


def test_what_was_replaced_comes_back(modules):
    class Owner:
        def method(self):
            return "native"

    native = Owner.method
    patching.replace(modules.home, "function", adds(1))
    modules.bystander.function = modules.home.function
    patching.replace_method(Owner, "method", lambda native: lambda self: "patched")
    patching.restore(modules.home, "function")
    patching.restore_method(Owner, "method")
    assert modules.home.function is modules.user.function is modules.bystander.function is modules.native
    assert Owner.method is native
    patching.restore(modules.home, "function")
    assert modules.home.function is modules.native
