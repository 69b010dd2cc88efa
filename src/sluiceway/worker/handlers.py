"""Imports the handler that a user names as `module:function`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

from sluiceway.kernel.errors import invalid

Handler = Callable[[Any], Any]


def load_handler(reference: str) -> Handler:
    """Return the callable named `package.module:name` (`name` may have dots), for which the current directory is searched, too.

    Raises `invalid_request` for a reference that names nothing that can be called. Errors of the module itself are raised as they are.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise invalid("handler", f"{reference!r} is not of the form module:function, such as tasks:send_email")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        raise invalid("handler", f"there is no module {error.name!r} in {here} or among the installed packages") from None
    try:
        found = reduce(getattr, name.split("."), module)
    except AttributeError:
        functions = sorted(
            each for each, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        )
        raise invalid("handler", f"{module_name} has no {name!r}; its functions: {', '.join(functions) or 'none'}") from None
    if not callable(found):
        raise invalid("handler", f"{reference} is a {type(found).__name__}, not a function")
    return found


def is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004
