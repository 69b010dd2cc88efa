"""Writes docs/reference/errors.md and docs/reference/errors/ from the table of errors: `python tools/docs_errors.py`."""

from __future__ import annotations

from pathlib import Path

from sluiceway.kernel.errors import KINDS, ErrorKind

DOCS = Path(__file__).resolve().parent.parent / "docs" / "reference"

HEAD = """\
# Errors

Find the `code` of an error here. Its page says what happened and what to do.

An error is an `application/problem+json` document. A `code` never changes its meaning. If `retryable` is true, a repeat of the same call is
safe and may succeed; after `outcome_unknown`, repeat a produce with the same idempotency key. `type` links to the code on the server's own
page, `/docs/errors`. The Python client raises the same codes as `CallError`.

<!-- tools/docs_errors.py generates this page and the linked ones from src/sluiceway/kernel/errors.py. Edit that table. -->

| code | status | retryable | meaning |
| --- | --- | --- | --- |
"""


def render() -> dict[str, str]:
    """The pages by their path in `docs/reference`."""
    rows = [
        f"| [`{code}`](errors/{code}.md) | {kind.status} | {'yes' if kind.retryable else 'no'} | {kind.title} |\n"
        for code, kind in KINDS.items()
    ]
    return {"errors.md": HEAD + "".join(rows), **{f"errors/{code}.md": page(code, kind) for code, kind in KINDS.items()}}


def page(code: str, kind: ErrorKind) -> str:
    """The page of one code."""
    repeat = "A repeat of the same call is safe and may succeed." if kind.retryable else "A repeat of the same call does not help."
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
