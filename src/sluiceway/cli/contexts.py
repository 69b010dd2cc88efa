"""Contexts (named servers): their file, and `sluiceway context`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from sluiceway.cli.common import Output, printing, table
from sluiceway.kernel.errors import SluicewayError, invalid

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_FIELDS = ("url", "api_key", "ca_file")


@dataclass(frozen=True, slots=True)
class Context:
    """A server's URL and credentials. `api_key` is `env:NAME`, `file:PATH`, or the key itself."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    ca_file: str | None = None

    @property
    def key_origin(self) -> str:
        """The origin of the key, without the key itself."""
        if self.api_key is None:
            return "none"
        return self.api_key if self.api_key.startswith(("env:", "file:")) else "stored here"


@dataclass(frozen=True, slots=True)
class Contexts:
    """All contexts by name, and the current one."""

    named: Mapping[str, Context] = field(default_factory=dict)
    current: str | None = None

    def get(self, name: str) -> Context:
        """The context of that name. Raises `invalid_request`, which lists the known names."""
        if name not in self.named:
            known = ", ".join(sorted(self.named)) or "none; add one: sluiceway context add NAME --url URL"
            raise invalid("context", f"there is no context {name!r}; known contexts: {known}")
        return self.named[name]


def contexts_file(environment: Mapping[str, str] = os.environ) -> Path:
    # The XDG standard says to ignore a relative XDG_CONFIG_HOME.
    base = environment.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "sluiceway" / "contexts.toml"


def read_contexts(path: Path) -> Contexts:
    """The contexts of the file; none without a file. Raises `invalid_request` with the file and its problem."""
    import tomllib

    try:
        readable_by_others = path.stat().st_mode & 0o077
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Contexts()
    except (OSError, UnicodeDecodeError) as error:
        raise invalid("context", f"cannot read {path}: {error}") from None
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise invalid("context", f"{path} is not TOML: {error}") from None
    contexts = _checked(tables, path)
    if readable_by_others and any(each.key_origin == "stored here" for each in contexts.named.values()):
        raise invalid("context", f"{path} holds an API key and is readable by other users; run: chmod 600 {path}")
    return contexts


def _checked(tables: dict[str, Any], path: Path) -> Contexts:
    named, current = tables.pop("contexts", {}), tables.pop("current", None)
    if tables or not isinstance(named, dict):
        raise invalid("context", f"{path}: expected current and [contexts.NAME], nothing else")
    for name, values in named.items():
        if not isinstance(values, dict) or not set(values) <= set(_FIELDS) or not all(isinstance(value, str) for value in values.values()):
            raise invalid("context", f"{path}: expected texts for {', '.join(_FIELDS)} in [contexts.{name}], nothing else")
        if "url" not in values:
            raise invalid("context", f"{path}: url is missing in [contexts.{name}]")
    if current is not None and current not in named:
        raise invalid("context", f"{path}: current names {current!r}, which does not exist; choose one: sluiceway context use NAME")
    return Contexts({name: Context(**values) for name, values in named.items()}, current)


def write_contexts(path: Path, contexts: Contexts) -> None:
    """Replace the file atomically, readable by its owner alone."""
    lines = [] if contexts.current is None else [f"current = {_quoted(contexts.current)}"]
    for name, context in sorted(contexts.named.items()):
        values = asdict(context)
        lines += ["", f"[contexts.{_quoted(name)}]", *(f"{key} = {_quoted(value)}" for key, value in values.items() if value is not None)]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write("\n".join(lines).lstrip("\n") + "\n")
    part.replace(path)


def _quoted(text: str) -> str:
    # A JSON string is valid TOML except for the character 127.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# -- the commands -----------------------------------------------------------------------------------------------------


@click.group()
def context() -> None:
    """Name servers with their API keys, and choose the current one."""


def _name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not NAME.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not 1 to 64 characters of A-Z a-z 0-9 _ . -, starting with a letter or digit", ctx, param)
    return value


@context.command()
@click.argument("name", callback=_name)
@click.option("--url", required=True, help="The server's URL.")
@click.option("--api-key-env", metavar="VARIABLE", help="Read the key from this environment variable at each use.")
@click.option("--api-key-file", type=click.Path(dir_okay=False, path_type=Path), help="Read the key from this file at each use.")
@click.option("--api-key", "ask", is_flag=True, help="Prompt for the key and store it in a file that only you can read.")
@click.option("--ca-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Trust these certificate authorities.")
@printing
def add(output: Output, name: str, url: str, api_key_env: str | None, api_key_file: Path | None, ask: bool, ca_file: Path | None) -> None:
    """Add or replace the context NAME. The first context becomes the current one.

    With --api-key the key is prompted for at a terminal, and otherwise read from stdin.
    """
    if sum((bool(api_key_env), bool(api_key_file), ask)) > 1:
        raise click.UsageError("--api-key-env, --api-key-file and --api-key exclude each other")
    if not re.match(r"https?://[^/?#@\s]+", url):
        raise click.BadParameter(f"{url!r} is not a URL such as https://queue.example:2319", param_hint="'--url'")
    key = f"env:{api_key_env}" if api_key_env else f"file:{api_key_file.absolute()}" if api_key_file else None
    if ask:
        key = _asked()
    path = contexts_file()
    before = read_contexts(path)
    made = Context(url.rstrip("/"), key, None if ca_file is None else str(ca_file.absolute()))
    write_contexts(path, Contexts({**before.named, name: made}, before.current or name))
    output.print(_shown(name, made, before.current or name), f"Added {name}" + ("" if before.current else ", now the current context"))


def _asked() -> str:
    key = click.prompt("API key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    key = str(key).strip()
    if not re.fullmatch(r"[!-~]+", key):
        raise click.UsageError("not an API key: expected slw_ID_SECRET without spaces")
    return key


def _shown(name: str, context: Context, current: str | None) -> dict[str, Any]:
    return {"name": name, "url": context.url, "api_key": context.key_origin, "ca_file": context.ca_file, "current": name == current}


@context.command()
@click.argument("name")
@printing
def use(output: Output, name: str) -> None:
    """Make NAME the current context."""
    path = contexts_file()
    contexts = read_contexts(path)
    chosen = contexts.get(name)
    write_contexts(path, Contexts(contexts.named, name))
    output.print(_shown(name, chosen, name), f"Using {name}: {chosen.url}")


@context.command("list")
@printing
def list_(output: Output) -> None:
    """List the contexts. Keys are hidden."""
    contexts = read_contexts(contexts_file())
    shown = [_shown(name, each, contexts.current) for name, each in sorted(contexts.named.items())]
    rows = [("*" if each["current"] else "", each["name"], each["url"], each["api_key"]) for each in shown]
    output.print_all(shown, table(("", "context", "url", "api key"), rows), "No contexts. Add one: sluiceway context add NAME --url URL")


@context.command()
@click.argument("name", required=False)
@printing
def show(output: Output, name: str | None) -> None:
    """Show the context NAME, or the current one. The key is hidden."""
    contexts = read_contexts(contexts_file())
    name = name or contexts.current
    if name is None:
        raise SluicewayError("invalid_request", "no current context; choose one: sluiceway context use NAME", "context")
    shown = _shown(name, contexts.get(name), contexts.current)
    output.print(shown, table(("", ""), [(key.replace("_", " "), "-" if value is None else value) for key, value in shown.items()]))


@context.command()
@click.argument("name")
@printing
def remove(output: Output, name: str) -> None:
    """Remove the context NAME."""
    path = contexts_file()
    contexts = read_contexts(path)
    contexts.get(name)
    left = {other: each for other, each in contexts.named.items() if other != name}
    write_contexts(path, Contexts(left, None if contexts.current == name else contexts.current))
    output.print({"name": name}, f"Removed {name}")
