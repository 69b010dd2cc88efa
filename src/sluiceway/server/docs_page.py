"""Documentation pages: the OpenAPI document and the table of errors as HTML without scripts, served entirely by this server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any, Final

from sluiceway.kernel.errors import KINDS, ErrorKind
from sluiceway.wire.answers import ERRORS_PAGE

_STYLE: Final = files("sluiceway.server").joinpath("docs.css").read_text(encoding="utf-8")
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS: Final = (
    (
        b"content-security-policy",
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'".encode(),
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
"""Headers of these pages, so that a text injected into one by mistake could do no harm."""

_CODE: Final = re.compile(r"`([^`]*)`")
_STRONG: Final = re.compile(r"\*([a-z]+)\*")
_JSON: Final = "application/json"
_SCHEMAS: Final = "#/components/schemas/"

Json = Mapping[str, Any]


def api_page(document: Json) -> bytes:
    """Render all calls with their fields, answers and errors, and the types they refer to."""
    return _page("Sluiceway API", _ApiPage(document).body())


def errors_page() -> bytes:
    """Render all error codes with advice; a problem's `type` links to its section."""
    links = "".join(f'<li><a href="#{code}">{code}</a> <small>{kind.status}</small></li>' for code, kind in KINDS.items())
    intro = _prose(
        "An error is an `application/problem+json` document. A `code` never changes its meaning. If `retryable` is true, a repeat of the "
        "same call is safe and may succeed."
    )
    sections = "".join(_error(code, kind) for code, kind in KINDS.items())
    nav = f'<nav><p><a href="/docs">API</a></p><h2>Errors</h2><ul>{links}</ul></nav>'
    return _page("Sluiceway errors", f"{nav}<main><h1>Errors</h1>{intro}{sections}</main>")


def _error(code: str, kind: ErrorKind) -> str:
    facts = f"{kind.status} · {'a repeat may succeed' if kind.retryable else 'a repeat does not help'}"
    return (
        f'<section id="{code}"><h3><a href="#{code}"><code>{code}</code></a> <small>{facts}</small></h3>'
        f"<p>{_inline(kind.title)}.</p><h4>When</h4>{_prose(kind.when)}<h4>What to do</h4>{_prose(kind.advice)}</section>"
    )


class _ApiPage:
    def __init__(self, document: Json) -> None:
        self._document = document
        self._schemas: Json = document["components"]["schemas"]

    def body(self) -> str:
        by_tag: dict[str, list[tuple[str, str, Json]]] = {}
        for path, methods in self._document["paths"].items():
            for method, operation in methods.items():
                by_tag.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
        info = self._document["info"]
        head = f"<h1>{escape(info['title'])} API <small>{escape(info['version'])}</small></h1>{_prose(info['description'])}"
        key = _prose(self._document["components"]["securitySchemes"]["key"]["description"])
        rooms = "".join(f"<h2>{escape(tag)}</h2>{''.join(self._operation(*each) for each in group)}" for tag, group in by_tag.items())
        types = "".join(self._type(name) for name in sorted(self._parts()))
        return f'{_contents(by_tag)}<main>{head}<h2 id="keys">API keys</h2>{key}{rooms}<h2 id="types">Types</h2>{types}</main>'

    def _operation(self, method: str, path: str, operation: Json) -> str:
        anchor = escape(operation["operationId"])
        action = operation.get("x-required-action")
        any_key = "needs no key" if operation.get("security") == [] else "needs any key"
        need = f'<p class="need">{f"needs <code>{escape(action)}</code>" if action else any_key}</p>'
        parts = [
            f'<section id="{anchor}"><h3><a href="#{anchor}"><code>{method} {escape(path)}</code></a></h3>',
            f"<p>{_inline(operation['summary'])}.</p>{need}{_prose(operation.get('description', ''))}",
            self._request(operation["requestBody"]["content"], operation["parameters"])
            if "requestBody" in operation
            else self._query(operation["parameters"]),
            *(self._answer(status, answer) for status, answer in operation["responses"].items() if "$ref" not in answer),
            self._errors(operation["responses"]),
        ]
        return "".join(parts) + "</section>"

    def _request(self, content: Json, parameters: Iterable[Json]) -> str:
        kinds = " or ".join(f"<code>{escape(kind)}</code>" for kind in content)
        names = ", ".join(f"<code>{escape(each['name'])}</code>" for each in parameters if each.get("in") == "query")
        arrow = f"<p>With an Arrow body, in the query string: {names}.</p>" if names else ""
        return f"<h4>Request <small>{kinds}</small></h4>{self._fields(content[_JSON]['schema'], of_call=True)}{arrow}"

    def _query(self, parameters: Iterable[Json]) -> str:
        rows = [
            self._row(each["name"], {"description": each["description"], **each["schema"]}, each["required"])
            for each in parameters
            if each.get("in") == "query"
        ]
        return f"<h4>Query string</h4>{_table(rows)}" if rows else ""

    def _answer(self, status: str, answer: Json) -> str:
        kinds = " or ".join(f"<code>{escape(kind)}</code>" for kind in answer["content"])
        schema = answer["content"].get(_JSON, {}).get("schema", {})
        fields = "<p>or</p>".join(self._fields(each) for each in schema.get("anyOf", [schema]))
        return f"<h4>Answer {status} <small>{kinds}</small></h4>{fields}"

    def _errors(self, responses: Json) -> str:
        shown = [
            f'<li>{status} <a href="{ERRORS_PAGE}#{code}"><code>{code}</code></a></li>'
            for status, answer in responses.items()
            for code in answer.get("$ref", "").rpartition("/")[2].split(".")[1:]
        ]
        return f'<details><summary>Errors</summary><ul class="codes">{"".join(shown)}</ul></details>' if shown else ""

    def _fields(self, schema: Json, of_call: bool = False) -> str:
        """Render an object's fields as a table, or a phrase if there are none. In a call, required fields come first."""
        name = _name(schema)
        whole = self._schemas[name] if name else schema
        required = whole.get("required", ()) if of_call else ()
        fields = sorted(whole.get("properties", {}).items(), key=lambda pair: pair[0] not in required)
        rows = [self._row(field, each, field in required) for field, each in fields]
        if rows:
            return _table(rows)
        if whole.get("type") == "object":
            return "<p>An object without fields.</p>"
        return f"<p>{self._kind(whole)}</p>" if schema else ""

    def _row(self, name: str, field: Json, required: bool) -> str:
        given = field.get("default") not in (None, "")
        default = f"<small>default <code>{escape(json.dumps(field['default']))}</code></small>" if given else ""
        must = "" if not required else "<small>required</small>"
        return (
            f"<tr><th><code>{escape(name)}</code>{must}</th><td>{self._kind(field)}{default}</td>"
            f"<td>{_inline(field.get('description', ''))}</td></tr>"
        )

    def _kind(self, field: Json) -> str:
        """Render the type of a value in short form."""
        if name := _name(field):
            return f'<a href="#type-{name}">{name}</a>'
        if "anyOf" in field:
            return " or ".join(self._kind(each) for each in field["anyOf"])
        if "enum" in field:
            return " | ".join(f"<code>{escape(str(each))}</code>" for each in field["enum"])
        if "title" in field:
            return escape(str(field["title"]))
        kind = escape(str(field.get("type", "anything")))
        if kind == "array":
            return f"list of {self._kind(field.get('items', {}))}{_bounds(field, 'minItems', 'maxItems')}"
        if kind == "object" and isinstance(field.get("additionalProperties"), dict):
            return f"object of {self._kind(field['additionalProperties'])}"
        if field.get("contentEncoding") == "base64":
            return "base64"
        return kind + (_bounds(field, "minimum", "maximum") if kind in ("integer", "number") else "")

    def _type(self, name: str) -> str:
        schema = self._schemas[name]
        return f'<section id="type-{name}"><h3>{name}</h3>{_prose(schema.get("description", ""))}{self._fields(schema)}</section>'

    def _parts(self) -> set[str]:
        """Names of the types that fields refer to. Types of whole calls and answers are shown with their calls."""
        found: set[str] = set()
        for schema in self._schemas.values():
            for field in schema.get("properties", {}).values():
                found.update(re.findall(rf"{_SCHEMAS}(\w+)", str(field)))
        return found


def _contents(by_tag: Mapping[str, list[tuple[str, str, Json]]]) -> str:
    parts = [
        f"<h2>{escape(tag)}</h2><ul>"
        + "".join(f'<li><a href="#{escape(each["operationId"])}">{escape(path.removeprefix("/v1/"))}</a></li>' for _, path, each in group)
        + "</ul>"
        for tag, group in by_tag.items()
    ]
    links = f'<p><a href="/openapi.json">openapi.json</a> · <a href="{ERRORS_PAGE}">errors</a> · <a href="#types">types</a></p>'
    return f"<nav>{links}{''.join(parts)}</nav>"


def _name(schema: Json) -> str:
    return str(schema.get("$ref", "")).removeprefix(_SCHEMAS)


def _bounds(field: Json, least: str, most: str) -> str:
    low, high = field.get(least), field.get(most)
    if high is not None and high < 1 << 53:
        return f" ({low or 0:,}–{high:,})"
    return "" if low is None else f" (from {low:,})"


def _table(rows: Iterable[str]) -> str:
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def _inline(text: str) -> str:
    return _STRONG.sub(r"<em>\1</em>", _CODE.sub(r"<code>\1</code>", escape(text, quote=False)))


def _prose(text: str) -> str:
    return "".join(f"<p>{_inline(paragraph)}</p>" for paragraph in text.split("\n\n") if paragraph)


def _page(title: str, body: str) -> bytes:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>"
    ).encode()
