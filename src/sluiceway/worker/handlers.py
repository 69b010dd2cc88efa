"""Imports the handler that a user names as `module:function`."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

from sluiceway.kernel.errors import SluicewayError, invalid

Handler = Callable[[Any], Any]


def load_handler(reference: str) -> Handler:
    """Return the callable named `package.module:name` (`name` may have dots), for which the current directory is searched, too.

    Raises `invalid_request` for a reference that names nothing that can be called with one argument, and for a module that cannot be
    imported, with the error and its line.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise invalid("handler", f"{reference!r} is not of the form module:function, such as tasks:send_email")
    if "/" in module_name or module_name.endswith(".py") or module_name.startswith("."):
        raise invalid("handler", f"{module_name!r} is not a module; for the file tasks.py in this folder it is tasks:{name}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise _not_imported(module_name, error) from error
        raise invalid("handler", f"there is no module {error.name!r} in {here} or among the installed packages") from None
    except Exception as error:
        raise _not_imported(module_name, error) from error
    try:
        found = reduce(getattr, name.split("."), module)
    except AttributeError:
        functions = sorted(
            each for each, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        )
        raise invalid("handler", f"{module_name} has no {name!r}; its functions: {', '.join(functions) or 'none'}") from None
    if not callable(found):
        raise invalid("handler", f"{reference} is a {type(found).__name__}, not a function")
    _check(reference, found)
    return found


def _not_imported(module_name: str, error: Exception) -> SluicewayError:
    """The error of an import, and the last line of a file that it comes from."""
    if isinstance(error, SyntaxError):
        return invalid("handler", f"{module_name} cannot be imported: {error}")
    last = traceback.extract_tb(error.__traceback__)[-1]
    return invalid("handler", f"{module_name} cannot be imported: {type(error).__name__}: {error} ({last.filename}:{last.lineno})")


def _check(reference: str, handler: Handler) -> None:
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise invalid("handler", f"{reference} is a generator: it would never be run. Leave out `yield`")
    try:
        inspect.signature(handler).bind(None)
    except TypeError:
        raise invalid("handler", f"{reference}{inspect.signature(handler)} cannot be called with one argument, the item") from None
    except ValueError:
        # Built-in functions may have no signature.
        pass


def is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004
