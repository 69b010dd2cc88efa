"""Writes the reference pages that come from the code, into a folder: `python tools/docs_reference.py FOLDER`.

Commands, configuration keys, HTTP calls, metrics and the Python API. `make docs` calls it for each build of the site, so these pages are
never out of date, and are not in the repository.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click
import msgspec
from prometheus_client.metrics_core import Metric

from sluiceway.cli.main import cli
from sluiceway.instance.configuration import schema
from sluiceway.instance.service import Service
from sluiceway.server.metrics import Metrics
from sluiceway.worker.counts import WorkerMetrics

OPENAPI = Path(__file__).resolve().parent.parent / "docs" / "reference" / "openapi.json"
MODULES = ("client", "worker", "spark", "group", "testing")
"""Modules whose `__all__` is the Python API."""


def render() -> dict[str, str]:
    """The pages by their path in the folder."""
    return {
        **_commands(),
        "settings.md": _settings(),
        **_calls(json.loads(OPENAPI.read_bytes())),
        "metrics.md": asyncio.run(_metrics()),
        **{f"python/{name}.md": _module(name) for name in MODULES},
    }


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [" | ".join(row) for row in (head, ("---",) * len(head), *rows)]
    return "".join(f"| {line} |\n" for line in lines)


# ---- commands -------------------------------------------------------------------------------------------------


def _commands() -> dict[str, str]:
    context = click.Context(cli, info_name="sluiceway")
    found = {}
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None, name
        below = click.Context(command, info_name=name, parent=context)
        found[f"commands/{name}.md"] = f"# sluiceway {name}\n\n" + "\n".join(_command(command, below, 1))
    return found


def _command(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    """The sections of a command and of those below it."""
    if level > 1:
        yield f"{'#' * min(level, 3)} {context.command_path}\n"
    yield f"{_help(command.help or '')}\n\n```sh\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    records = [record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))]
    options = [(f"`{_cell(names)}`", _cell(meaning).replace("[", "\\[")) for names, meaning in records if meaning and "--help" not in names]
    if options:
        yield _table(("option", "meaning"), options)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _command(below, click.Context(below, info_name=name, parent=context), level + 1)


def _help(text: str) -> str:
    """The help of a command as Markdown. click keeps the lines of a paragraph that begins with a backspace."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        f"```text\n{each.removeprefix(chr(8)).strip(chr(10))}\n```" if each.startswith("\b") else each.replace("<", "&lt;")
        for each in paragraphs
    )


# ---- configuration --------------------------------------------------------------------------------------------


def _settings() -> str:
    head = (
        "# Configuration keys\n\nLook up a key of the configuration file: its type, its default, and whether a change takes effect live."
        " This is what `sluiceway config schema` prints. [Configuration](configuration.md) explains how the keys work together.\n"
    )
    defined: Mapping[str, dict[str, Any]] = schema()["$defs"]
    parts = [head]
    for name, table in defined.items():
        kind = name.removeprefix("backend_")
        title = f"[{name}]" if kind == name else f"[backends.NAME] with kind = &quot;{kind}&quot;"
        parts.append(f"## {title}\n\n{_sentence(table.get('description', ''))}\n")
        parts.append(
            _table(("key", "type", "default", "change", "meaning"), (_setting(key, of) for key, of in table["properties"].items()))
        )
    return "\n".join(parts)


def _setting(key: str, of: Mapping[str, Any]) -> tuple[str, ...]:
    meaning, _, change = of.get("description", "").rpartition("; ")
    live = {"can change live": "live", "a change needs a restart": "restart"}
    if change not in live:
        meaning, change = of.get("description", ""), ""
    return f"`{key}`", _type(of), _literal(of.get("default")), live.get(change, ""), _cell(_sentence(meaning))


def _literal(value: object) -> str:
    return "" if value in (None, "") else f"`{json.dumps(value)}`"


def _sentence(text: str) -> str:
    return text and text[0].upper() + text[1:].rstrip(".") + "."


# ---- HTTP calls -----------------------------------------------------------------------------------------------


def _calls(document: Mapping[str, Any]) -> dict[str, str]:
    pages: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            subject = call["tags"][0].partition("/")[0]
            pages.setdefault(subject, []).append(_call(document, f"{method.upper()} {path}", call))
    head = "Look up the fields and errors of these calls. [The HTTP API](../api.md) says what they do."
    return {f"http/{subject}.md": f"# HTTP: {subject}\n\n{head}\n\n" + "\n".join(calls) for subject, calls in pages.items()}


def _call(document: Mapping[str, Any], name: str, call: Mapping[str, Any]) -> str:
    action = call.get("x-required-action")
    scope = f" Scope: `{action}`." if action else ""
    parts = [f"## `{name}`\n\n{_sentence(call['summary'])}{scope} {_linked(call.get('description', ''))}".rstrip() + "\n"]
    body = call.get("requestBody", {}).get("content", {})
    if others := [f"`{each}`" for each in body if each != "application/json"]:
        parts.append(f"The body may also be {' or '.join(others)}.\n")
    if (request := body.get("application/json")) and (rows := list(_fields(document, request["schema"]))):
        parts.append(_table(("request field", "type", "default", "meaning"), rows))
    codes = {}
    for status, answer in call["responses"].items():
        if reference := answer.get("$ref"):
            codes[status] = reference.rpartition("/")[2].split(".")[1:]
            continue
        content = answer.get("content", {}).get("application/json")
        if status.startswith("2") and content and (rows := list(_fields(document, content["schema"]))):
            parts.append(_table(("answer field", "type", "meaning"), [(row[0], row[1], row[3]) for row in rows]))
    if codes:
        listed = (f"{status} {', '.join(f'[`{code}`](../errors/{code}.md)' for code in each)}" for status, each in codes.items())
        parts.append(f"Errors: {' · '.join(listed)}\n")
    return "\n".join(parts)


def _resolved(document: Mapping[str, Any], of: Mapping[str, Any]) -> Mapping[str, Any]:
    while reference := of.get("$ref"):
        of = document["components"]["schemas"][reference.rpartition("/")[2]] | {key: value for key, value in of.items() if key != "$ref"}
    return of


def _fields(document: Mapping[str, Any], of: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each field of an object: name, type, default, meaning. Those of objects in it follow it, with their path."""
    yield from _below(document, of, "", frozenset())


def _below(document: Mapping[str, Any], of: Mapping[str, Any], path: str, seen: frozenset[str]) -> Iterator[tuple[str, ...]]:
    whole = _resolved(document, of)
    required = whole.get("required", ())
    for name, field in whole.get("properties", {}).items():
        of_field = _resolved(document, field)
        default = "required" if name in required else _literal(of_field.get("default"))
        yield f"`{path}{name}`", _type(field), default, _cell(_linked(of_field.get("description", "")))
        inner, suffix = field, "."
        for each in field.get("anyOf", ()):
            inner = each if each.get("type") != "null" else inner
        if inner.get("type") == "array":
            inner, suffix = inner.get("items", {}), "[]."
        reference = inner.get("$ref", "")
        if reference and reference not in seen:
            yield from _below(document, inner, f"{path}{name}{suffix}", seen | {reference})


def _linked(text: str) -> str:
    """The text of a page two folders below `docs`, in which the path of a page is a link to it."""
    return re.sub(r"`?docs/([\w./-]+?/([\w-]+)\.md)`?", r"[\2](../../\1)", text)


def _type(of: Mapping[str, Any]) -> str:
    """The type of a field in a few words."""
    if reference := of.get("$ref"):
        return str(reference.rpartition("/")[2])
    if "enum" in of:
        return " or ".join(f"`{each}`" for each in of["enum"] if each)
    if "anyOf" in of:
        return " or ".join(dict.fromkeys(_type(each) for each in of["anyOf"]))
    if of.get("type") == "array":
        return f"list of {_type(of.get('items', {}))}"
    kind = of.get("type", "any")
    return _cell(of.get("title") or (" or ".join(kind) if isinstance(kind, list) else str(kind)))


# ---- metrics --------------------------------------------------------------------------------------------------


async def _metrics() -> str:
    with tempfile.TemporaryDirectory() as name:
        service = Service(Path(name))
        await service.start()
        try:
            metrics = Metrics(service)
            await metrics.scrape()
            server = list(metrics._registry.collect())
        finally:
            await service.stop()
    return "\n".join(
        (
            "# Metrics\n\nLook up a metric's type, labels and meaning."
            " [Operations](../guides/operations.md#metrics) has how to scrape them, and the alerts.\n",
            "## Server\n\nAt `/metrics` of each instance.\n",
            _families(server),
            "## Worker\n\nAt `/metrics` of the address in `--listen` of [a worker](../guides/workers.md#monitoring).\n",
            _families(WorkerMetrics("", list).collect()),
        )
    )


def _families(families: Iterable[Metric]) -> str:
    rows = []
    for each in families:
        name = each.name + {"counter": "_total", "info": "_info"}.get(each.type, "")
        labels = getattr(each, "_labelnames", ())
        rows.append((f"`{name}`", each.type, ", ".join(f"`{label}`" for label in labels), _cell(_sentence(each.documentation))))
    return _table(("metric", "type", "labels", "meaning"), sorted(rows))


# ---- Python API -----------------------------------------------------------------------------------------------


def _module(name: str) -> str:
    """The directives from which mkdocstrings makes a page: what can be called first, then the types that only hold values."""
    module = importlib.import_module(f"sluiceway.{name}")
    things = {each: getattr(module, each) for each in module.__all__ if not each.isupper()}
    done, _, rest = (module.__doc__ or "").partition("\n")
    parts = [_linked(f"# sluiceway.{name}\n\n{done}\n{inspect.cleandoc(rest)}\n")]
    for each, thing in sorted(things.items(), key=lambda item: (_is_data(item[1]), item[0].startswith("Async"), item[0])):
        # A module of the same name would be taken in its place.
        place = f"sluiceway.{name}.{each}" if not _is_module(f"{module.__name__}.{each}") else f"{thing.__module__}.{each}"
        table = _values(thing) if _is_data(thing) else ""
        undescribed = "    options:\n      show_if_no_docstring: true\n" if _is_data(thing) and not table else ""
        parts.append(f"::: {place}\n{undescribed}\n{table}")
    return "\n".join(parts)


def _is_module(name: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return False


def _is_data(thing: object) -> bool:
    """True for a type that only holds values, such as an answer."""
    return isinstance(thing, type) and any(hasattr(thing, name) for name in ("__struct_fields__", "__dataclass_fields__", "_fields"))


def _values(kind: Any) -> str:
    """A table of the fields of an answer, or of another type that describes them where it declares them, not in docstrings."""
    rows = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        metas = getattr(hint, "__metadata__", ())
        meaning = "".join(meta.description for meta in metas if isinstance(meta, msgspec.Meta) and meta.description)
        rows.append((f"`{name}`", f"`{_hint(hint)}`", _cell(_linked(meaning))))
    described = kind.__module__.startswith("sluiceway.contract.") or any(row[2] for row in rows)
    return _table(("field", "type", "meaning"), rows) if described else ""


def _hint(hint: Any) -> str:
    """A type as it is written, without what is said of it and without modules."""
    if get_origin(hint) is Annotated:
        return _hint(get_args(hint)[0])
    if (arguments := get_args(hint)) and get_origin(hint) is not Literal:
        names = [_hint(each) for each in arguments]
        if get_origin(hint) in (Union, types.UnionType):
            return " \\| ".join(names)
        return f"{_hint(get_origin(hint))}[{', '.join(names)}]"
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint).replace("typing.", "")) if not arguments else str(hint)


def write(folder: Path) -> None:
    for name, text in render().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
