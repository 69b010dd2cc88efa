"""Prints what users rely on, as text to be compared: the OpenAPI document and every command's `--help`.

git worktree add ../before COMMIT
diff <(PYTHONPATH=../before/src python tools/surface.py) <(python tools/surface.py)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import click


def openapi() -> str:
    """The document of a server that this starts on loopback and stops again."""
    with tempfile.TemporaryDirectory(prefix="sluiceway-surface-") as folder:
        told = Path(folder) / "url"
        command = [sys.executable, "-m", "sluiceway.server.run", "--data", f"{folder}/data", "--port", "0", "--url-file", str(told)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                return json.dumps(_fetched(told), indent=1, sort_keys=True)
            finally:
                server.terminate()


def _fetched(told: Path) -> object:
    """The document of the server whose URL will be in that file; it has 60 s for its start."""
    last = time.monotonic() + 60
    while not (told.exists() and told.read_text().strip()):
        if time.monotonic() > last:
            raise TimeoutError("the server did not start within 60 s")
        time.sleep(0.1)
    with urllib.request.urlopen(f"{told.read_text().strip()}/openapi.json", timeout=30) as answer:
        return json.load(answer)


def commands(command: click.Command, context: click.Context) -> list[str]:
    """The help of a command and of all below it."""
    told = [f"$ {context.command_path} --help\n{command.get_help(context)}\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None, name
            told += commands(below, click.Context(below, info_name=name, parent=context, terminal_width=120))
    return told


def main() -> None:
    from sluiceway.cli.main import cli

    print(openapi())
    print("\n".join(commands(cli, click.Context(cli, info_name="sluiceway", terminal_width=120))))


if __name__ == "__main__":
    main()
