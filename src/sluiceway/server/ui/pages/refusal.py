"""Pages of which a reader may see nothing without a scope that their key has not."""

from __future__ import annotations

from functools import wraps

from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.view import Gather
from sluiceway.server.ui.visit import Visit


def refusing(gather: Gather) -> Gather:
    """The same, but what the API refuses to this reader is `refused`, for the page to say so in its own words; otherwise that is None."""

    @wraps(gather)
    async def gathered(visit: Visit) -> Facts:
        try:
            return {**await gather(visit), "refused": None}
        except ProblemError as error:
            # A listener that has nothing for administrators does not know the calls either.
            elsewhere = error.code == "not_found" and error.detail.startswith("there is no endpoint")
            if error.code != "forbidden" and not elsewhere:
                raise
            return {"refused": error, "elsewhere": elsewhere}

    return gathered
