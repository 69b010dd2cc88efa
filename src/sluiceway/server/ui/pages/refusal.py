"""Pages that need a scope, and the notice for readers without it."""

from __future__ import annotations

from functools import wraps

from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.view import Gather
from sluiceway.server.ui.visit import Visit


def is_refused(error: ProblemError) -> bool:
    """Whether the reader's key or the listener does not allow the call."""
    return error.code == "forbidden" or is_elsewhere(error)


def is_elsewhere(error: ProblemError) -> bool:
    """Whether the call is only served at the administration address."""
    return error.code == "not_found" and error.detail.startswith("there is no endpoint")


def refusing(gather: Gather) -> Gather:
    """Wrap a gather function: a refusal becomes the variable `refused` instead of an error; otherwise `refused` is None."""

    @wraps(gather)
    async def gathered(visit: Visit) -> Facts:
        try:
            return {**await gather(visit), "refused": None}
        except ProblemError as error:
            if not is_refused(error):
                raise
            return {"refused": error, "elsewhere": is_elsewhere(error)}

    return gathered
