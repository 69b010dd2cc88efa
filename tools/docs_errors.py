"""Writes docs/errors.md from the table of errors: `python tools/docs_errors.py`."""

from __future__ import annotations

from pathlib import Path

from sluiceway.kernel.errors import KINDS

TARGET = Path(__file__).resolve().parent.parent / "docs" / "errors.md"

HEAD = """\
# Errors

Written by `tools/docs_errors.py` from `src/sluiceway/kernel/errors.py`; edit that table, not this page.

An error is `application/problem+json`. `code` never changes its meaning. `retryable` promises that the same call, repeated, is safe
and may succeed; after `outcome_unknown` repeat a produce with the same idempotency key.

| code | status | retryable | meaning |
| --- | --- | --- | --- |
"""


def render() -> str:
    """The page as it should be."""
    rows = [f"| `{code}` | {kind.status} | {'yes' if kind.retryable else 'no'} | {kind.title} |\n" for code, kind in KINDS.items()]
    return HEAD + "".join(rows)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
