"""Pages of which a reader may see nothing without a scope that their key has not."""

from __future__ import annotations

from functools import wraps

from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.view import Gather
from sluiceway.server.ui.visit import Visit


def is_refused(error: ProblemError) -> bool:
    """Whether the reader may not have it here, be it by their key or by the listener."""
    return error.code == "forbidden" or is_elsewhere(error)


def is_elsewhere(error: ProblemError) -> bool:
    """A listener that has nothing for administrators does not know their calls."""
    return error.code == "not_found" and error.detail.startswith("there is no endpoint")


def refusing(gather: Gather) -> Gather:
    """The same, but what the API refuses to this reader is `refused`, for the page to say so in its own words; otherwise that is None."""

    @wraps(gather)
    async def gathered(visit: Visit) -> Facts:
        try:
            return {**await gather(visit), "refused": None}
        except ProblemError as error:
            if not is_refused(error):
                raise
            return {"refused": error, "elsewhere": is_elsewhere(error)}

    return gathered
