"""Writes docs/errors.md and docs/errors/ from the table of errors: `python tools/docs_errors.py`."""

from __future__ import annotations

from pathlib import Path

from sluiceway.kernel.errors import KINDS, ErrorKind

DOCS = Path(__file__).resolve().parent.parent / "docs"

HEAD = """\
# Errors

Written by `tools/docs_errors.py` from `src/sluiceway/kernel/errors.py`; edit that table, not this page nor those that it links to.

An error is `application/problem+json`. `code` never changes its meaning. `retryable` promises that the same call, repeated, is safe
and may succeed; after `outcome_unknown` repeat a produce with the same idempotency key. `type` is the code's place in a page of the
server itself, `/docs/errors`. The Python client raises the same codes, as `CallError`.

| code | status | retryable | meaning |
| --- | --- | --- | --- |
"""


def render() -> dict[str, str]:
    """The pages as they should be, by their path in `docs`."""
    rows = [
        f"| [`{code}`](errors/{code}.md) | {kind.status} | {'yes' if kind.retryable else 'no'} | {kind.title} |\n"
        for code, kind in KINDS.items()
    ]
    return {"errors.md": HEAD + "".join(rows), **{f"errors/{code}.md": page(code, kind) for code, kind in KINDS.items()}}


def page(code: str, kind: ErrorKind) -> str:
    """What there is to say about one code."""
    repeat = "The same call, repeated, is safe and may succeed." if kind.retryable else "Repeating the same call does not help."
    return f"""\
# {code}

{kind.title}.

HTTP status {kind.status}. {repeat}

**When.** {kind.when}

**What to do.** {kind.advice}

[All errors](../errors.md)
"""


def main() -> None:
    (DOCS / "errors").mkdir(exist_ok=True)
    pages = render()
    for old in (DOCS / "errors").iterdir():
        if f"errors/{old.name}" not in pages:
            old.unlink()
    for name, text in pages.items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
