"""`sluiceway config`: show, check and reload a server's configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from sluiceway.cli.common import EXIT_REFUSED, FILE, Output, printable, printing
from sluiceway.cli.session import Session, connected
from sluiceway.kernel.errors import SluicewayError


@click.group()
def config() -> None:
    """Show, check and reload a server's configuration."""


@config.command()
@click.option("--config", "file", type=FILE, help="Configuration file. [default: none, only the environment and the defaults]")
@click.option("--origin", is_flag=True, help="Show the origin of each value, and which need a restart.")
@click.option("--running", is_flag=True, help="Show the configuration of the running server. Needs the scope `admin`.")
@connected
def show(session: Session, file: Path | None, origin: bool, running: bool) -> None:
    """Show the effective configuration of a server started here. Secrets are hidden."""
    if running:
        if file is not None:
            raise click.UsageError("--running and --config exclude each other")
        answer = session.client.show_config()
        session.print(answer, "\n".join(_running(answer, origin)))
        return
    from sluiceway.instance.configuration import load, shown

    loaded = load(file)
    session.print(shown(loaded, origin), "\n".join(_toml(shown(loaded, True), origin)))


def _running(answer: dict[str, Any], origin: bool) -> Iterator[str]:
    yield f"# {answer['file'] or 'no file'}, applied {answer['applied_at']}"
    if failure := answer["last_error"]:
        yield f"# not applied at {failure['at']}: {printable(failure['detail'].encode(), 1_000)}"
    yield from _toml(answer["configuration"], origin)


def _toml(tables: Mapping[str, Any], origin: bool, prefix: str = "") -> list[str]:
    lines: list[str] = []
    for name, table in tables.items():
        if not _is_table(table):
            lines += [*([""] if lines else []), *_toml(table, origin, f"{prefix}{name}.")]
            continue
        lines += [*([""] if lines else []), f"[{prefix}{name}]"]
        for key, entry in table.items():
            note = f"  # {entry['origin']}{'; a change needs a restart' if entry['restart'] else ''}" if origin else ""
            # TOML has no null.
            lines.append(f"# {key} is not set{note}" if entry["value"] is None else f"{key} = {_value(entry['value'])}{note}")
    return lines


def _is_table(table: Mapping[str, Any]) -> bool:
    return all("origin" in entry and "value" in entry for entry in table.values())


def _value(value: object) -> str:
    return printable(json.dumps(value, ensure_ascii=False).encode(), 1_000)


@config.command()
@click.argument("file", type=FILE)
@printing
def check(output: Output, file: Path) -> int:
    """Check whether a server could start with FILE. Exits with 3 if not."""
    problems = problems_of(file)
    text = "\n".join(f"problem: {problem}" for problem in problems) or f"{file} is valid"
    output.print({"valid": not problems, "problems": problems}, text)
    return EXIT_REFUSED if problems else 0


def problems_of(file: Path) -> list[str]:
    """The problems of the file; empty if it is valid."""
    from sluiceway.instance import configuration

    try:
        return configuration.check(configuration.load(file))
    except SluicewayError as error:
        return [error.detail]


@config.command()
@printing
def schema(output: Output) -> None:
    """Print the JSON Schema of the configuration file, for editors and validators."""
    from sluiceway.instance.configuration import schema as of_file

    output.print(of_file(), json.dumps(of_file(), indent=2))


@config.command()
@connected
def reload(session: Session) -> None:
    """Make the server reload its configuration. All changes take effect, or none. Needs the scope `admin`."""
    answer = session.client.reload_config()
    session.print(answer, "\n".join(f"Changed {name}" for name in answer.changed) or "No changes")
