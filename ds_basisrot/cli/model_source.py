"""Builds a user's model, or list of pipeline layers, from MODULE:CALLABLE, with parameters that have shapes but no storage."""

import contextlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ds_basisrot.cli.errors import CommandError

if TYPE_CHECKING:
    from torch import nn


def build_on_meta(source: str, arguments: Sequence[str]) -> "nn.Module":
    """The module that MODULE:CALLABLE returns, built under torch.device("meta"); a list of pipeline layers as a `LayerList`.

    Args:
        source: "MODULE:CALLABLE"; MODULE may also be in the current folder, CALLABLE may be a class or have dots.
        arguments: "KEY=VALUE" for each keyword argument; a VALUE that is JSON is read as that, else it is text.

    Raises:
        CommandError: nothing of that name, or it failed, or what it returns is neither an nn.Module nor a list of layers.
    """
    import torch  # here and below: the parser of the command line need not wait for it

    from ds_basisrot.cli.layer_list import LayerList

    name, colon, path = source.partition(":")
    if not (name and colon and path):
        raise CommandError(f"--model: must be MODULE:CALLABLE, such as my_model:GPT, got {source!r}")
    keywords = _keywords(arguments)
    with _current_folder_importable(), contextlib.redirect_stdout(sys.stderr):  # stdout is for the figures
        factory = _find(name, path)
        try:
            with torch.device("meta"):
                model = factory(**keywords)
                if isinstance(model, (list, tuple)):
                    model = LayerList(model)
        except (Exception, SystemExit) as error:
            raise CommandError(
                f"--model: {source} failed with {_in_a_line(error)} (called with {_call(keywords)} under torch.device('meta'), "
                "where tensors have no numbers)"
            ) from error
    if not isinstance(model, torch.nn.Module):
        hint = "; give its arguments with --arg KEY=VALUE" if inspect.isfunction(model) else ""
        raise CommandError(f"--model: {source} must return a torch.nn.Module or a list of layers, got {type(model).__name__}{hint}")
    return model


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's module may have changed the path
            sys.path.remove(here)


def _find(name: str, path: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # a module that the user's module imports
            raise CommandError(f"--model: importing {name} failed with {_in_a_line(error)}") from error
        raise CommandError(f"--model: no module {name!r}, neither in the current folder nor installed") from error
    except (Exception, SystemExit) as error:
        raise CommandError(f"--model: importing {name} failed with {_in_a_line(error)}") from error
    try:
        factory = attrgetter(path)(module)
    except AttributeError as error:
        raise CommandError(f"--model: {name} ({getattr(module, '__file__', 'built in')}) has no {path!r}") from error
    if not callable(factory):
        raise CommandError(f"--model: {name}:{path} cannot be called, it is a {type(factory).__name__}; name a class or a function")
    return factory


def _keywords(arguments: Sequence[str]) -> dict[str, Any]:
    result = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not (equals and key.isidentifier()):
            raise CommandError(f"--arg: must be KEY=VALUE, such as layers=12, got {argument!r}")
        if key in result:
            raise CommandError(f"--arg: {key} is given twice")
        try:
            result[key] = json.loads(text)
        except ValueError:
            result[key] = text
    return result


def _call(keywords: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in keywords.items()) or "no arguments"


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
