"""Generates the blocking half of the client from its asyncio half: `python tools/unasync.py`.

Docstrings and comments are copied, so they must be true of both halves. With `--check` it writes nothing: it prints how the files differ
from what it would write, and exits with 1 if they do.
"""

from __future__ import annotations

import argparse
import difflib
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
CLIENT: Final = "src/sluiceway/client"
GENERATED: Final = {f"{CLIENT}/_sync/{name}": f"{CLIENT}/_async/{name}" for name in ("channel.py", "client.py")}
"""Each generated file, and its source."""

NAMES: Final = {
    "AsyncChannel": "Channel",
    "AsyncClient": "Client",
    "AsyncConnections": "Connections",
    "AsyncConsumer": "Consumer",
    "AsyncGenerator": "Generator",
    "AsyncIterator": "Iterator",
    "AsyncProducer": "Producer",
    "AsyncTransport": "Transport",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "_async": "_sync",
    "aclose": "close",
    "aclosing": "closing",
    "as_async_transport": "as_transport",
    "async_connections": "connections",
    # The only use of asyncio is its `sleep`; `leftovers` refuses any other.
    "asyncio": "time",
}
KEYWORDS: Final = ("async", "await")
_STRINGS_AND_COMMENTS: Final = (tokenize.STRING, tokenize.COMMENT)
_LEFT_OVER: Final = re.compile(r"\b(async|await|aiter_\w+|__a(iter|next)__|Async\w+|time\.(?!sleep\b|monotonic\b)\w+)\b")


def translated(source: str) -> str:
    """Return asyncio code as blocking code. Strings and comments stay as they are."""
    lines = source.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
        if token.type != tokenize.NAME:
            continue
        row = token.start[0] - 1
        before, after = lines[row][: token.start[1]], lines[row][token.end[1] :]
        if token.string in KEYWORDS:
            lines[row] = before + after.lstrip(" ")
        elif token.string in NAMES:
            lines[row] = before + NAMES[token.string] + after
    # A blocking generator has three parameters, an asynchronous one has two.
    return re.sub(r"\bGenerator\[(.+), None\]", r"Generator[\1, None, None]", "".join(lines))


def leftovers(code: str) -> list[str]:
    """Return the asynchronous names that are left in generated code, because `NAMES` lacks them."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    without_strings = " ".join(token.string for token in tokens if token.type not in _STRINGS_AND_COMMENTS).replace(" . ", ".")
    return sorted({found[0] for found in _LEFT_OVER.finditer(without_strings)})


def _ruff(code: str, path: str, *command: str) -> str:
    done = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", path, "-"]
    return subprocess.run(done, cwd=ROOT, input=code, capture_output=True, text=True, encoding="utf-8", check=True).stdout


def render() -> dict[str, str]:
    """Return the text of each generated file, by its path. Raises ValueError if a source has an asynchronous name that `NAMES` lacks."""
    made = {}
    for path, source in GENERATED.items():
        code = translated((ROOT / source).read_text(encoding="utf-8"))
        if left := leftovers(code):
            raise ValueError(f"{source}: NAMES in tools/unasync.py has no translation of {', '.join(left)}")
        head = f"# Generated from {source} by `python tools/unasync.py`. Edit that file, then run the command again.\n"
        made[path] = _ruff(_ruff(head + code, path, "check", "--select", "I", "--fix"), path, "format")
    return made


def differences(root: Path, made: dict[str, str]) -> str:
    """Return how the files below `root` differ from the texts in `made`, as a unified diff; empty if they do not."""
    found: list[str] = []
    for path, text in made.items():
        file = root / path
        there = file.read_text(encoding="utf-8") if file.exists() else ""
        found += difflib.unified_diff(there.splitlines(), text.splitlines(), path, f"{path} as generated", n=1, lineterm="")
    return "\n".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a generated file is out of date")
    check = parser.parse_args().check
    made = render()
    if not check:
        for path, text in made.items():
            (ROOT / path).write_text(text, encoding="utf-8")
        return 0
    difference = differences(ROOT, made)
    if difference:
        print(f"{difference}\nOut of date. Run: python tools/unasync.py")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
