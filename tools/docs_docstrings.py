"""An extension of Griffe, which reads docstrings for the site: the path of a page in a docstring is a link to it there.

A docstring says `docs/guides/testing.md`, since that is what a reader of the source can open.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class PageLinks(griffe.Extension):  # type: ignore[misc]
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            # As docs_reference.py has it for the pages that it writes.
            obj.docstring.value = re.sub(r"`?docs/([\w./-]+?/([\w-]+)\.md)`?", r"[\2](../../\1)", obj.docstring.value)
