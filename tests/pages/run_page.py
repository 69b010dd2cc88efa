"""Runs the blocks of pages of docs/: `python -m tests.pages.run_page URL PAGE…`, in an empty folder. page_blocks.py says how a block runs.

Blocks of python run in one namespace for each page, as in a notebook, also with `await` outside of a function; blocks of sh in a shell
whose `sluiceway` is this one and whose server that of the URL. A block that begins with `# NAME.py` or `# NAME.toml` is written into that
file. A page says that its server is on the port of `sluiceway dev`, and is told another. In a command, LEASE_ID and ITEM_ID stand for the
lease and the item that were printed last. The last line of stdout is the outputs, page by page and block by block, as JSON.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests.pages.page_blocks import FILE, Block, blocks, masked

USUAL = "http://127.0.0.1:2319"
PATIENCE = 120.0
"""Seconds until a block must have printed what the page shows."""

_LEASE_ID = re.compile(r"\b[0-9a-z]{8}\.\d+\.L\d+\b")
_ITEM_ID = re.compile(r"\b[0-9a-z]{8}\.\d+\.\d+\b")


class Reader:
    """One who does what the pages say."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._names: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._seen = ""

    def read(self, page: Path) -> list[str]:
        """What each block prints. An error names the block's line in the page."""
        self._names = {"__name__": "__main__"}
        printed = []
        for block in blocks(page.read_text(encoding="utf-8")):
            try:
                printed.append(self._run(block, page).replace(self._url, USUAL))
            except BaseException:
                print(f"{page}: the block in line {block.line}", file=sys.stderr)
                raise
        return printed

    def close(self) -> None:
        for code in list(self._started):
            self._stop(code)
        self._loop.close()

    def _stop(self, code: str) -> None:
        """End the command that runs in the background, if it does: a page that starts it again has stopped it."""
        if process := self._started.pop(code, None):
            process.terminate()
            process.wait(PATIENCE)

    def _run(self, block: Block, page: Path) -> str:
        if file := FILE.match(block.code):
            Path(file[1]).write_text(block.code.replace(USUAL, self._url), encoding="utf-8")
            return ""
        if block.mode == "in the background":
            self._stop(block.code)
            self._started[block.code] = subprocess.Popen(["sh", "-c", f"exec {block.code}"], env=self._environment())
            return ""
        deadline = time.monotonic() + PATIENCE
        while True:
            printed = self._python(block, page) if block.language == "python" else self._shell(block)
            if block.mode == "once" or masked(printed) == masked(block.shown or "") or time.monotonic() > deadline:
                return printed
            time.sleep(0.2)

    def _python(self, block: Block, page: Path) -> str:
        out = io.StringIO()
        # An exception's line is that of the page.
        text = "\n" * (block.line - 1) + block.code.replace(USUAL, self._url)
        code = compile(text, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with redirect_stdout(out):
            if code.co_flags & inspect.CO_COROUTINE:
                self._loop.run_until_complete(eval(code, self._names))
            else:
                exec(code, self._names)
        return out.getvalue()

    def _shell(self, block: Block) -> str:
        code = block.code.replace(USUAL, self._url)
        for name, ids in (("LEASE_ID", _LEASE_ID), ("ITEM_ID", _ITEM_ID)):
            if name in code:
                code = code.replace(name, ids.findall(self._seen)[-1])
        done = subprocess.run(
            ["sh", "-e", "-c", code], env=self._environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stdout}{done.stderr}")
        self._seen += done.stdout + done.stderr
        return done.stdout

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"PATH": path, "SLUICEWAY_URL": self._url}


def main() -> None:
    reader = Reader(sys.argv[1])
    try:
        printed = [reader.read(Path(page)) for page in sys.argv[2:]]
    finally:
        reader.close()
    print(json.dumps(printed))


if __name__ == "__main__":
    main()
