"""The OpenAPI document, and the pages made from it: complete, true to the tables, and the same wherever they are made."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from sluiceway.instance.service import Service
from sluiceway.kernel.errors import KINDS
from sluiceway.kernel.limits import MAX_ITEMS_JSON, MAX_PARTITIONS
from sluiceway.server.app import create_app
from sluiceway.server.docs_page import api_page
from sluiceway.server.endpoints import Endpoint, Page
from sluiceway.server.http import Request
from sluiceway.server.openapi import as_text, codes_of, describe
from sluiceway.wire import shapes
from sluiceway.wire.decoding import Call
from tests.server.server_process import ServerProcess
from tests.server.server_running import Running, running

Json = dict[str, Any]


@pytest.fixture(scope="module")
def document(repository: Path) -> Json:
    """The one that is kept, which is the one that is served."""
    found: Json = json.loads((repository / "docs" / "reference" / "openapi.json").read_bytes())
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("data")) as served:
        yield served


def operations(document: Json) -> Iterator[tuple[str, Json]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def resolved(document: Json, part: Json) -> Json:
    """What a reference stands for."""
    while "$ref" in part:
        found: Any = document
        for name in part["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        part = found
    return part


def test_the_document_that_is_kept_is_the_one_that_is_made(repository: Path) -> None:
    made = runpy.run_path(str(repository / "tools" / "docs_openapi.py"))["render"]()
    assert (repository / "docs" / "reference" / "openapi.json").read_bytes() == made, "run: python tools/docs_openapi.py"


def test_the_document_that_is_kept_is_the_one_that_is_served(repository: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as served:
        answer = httpx.get(f"{served.url}/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.content == (repository / "docs" / "reference" / "openapi.json").read_bytes()


def test_every_reference_leads_somewhere(document: Json) -> None:
    found = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)))
    assert len(found) > 50
    for reference in found:
        assert resolved(document, {"$ref": reference})
    for sort, parts in document["components"].items():
        for name in parts:
            used = f"#/components/{sort}/{name}" in found or sort == "securitySchemes"
            assert used, f"nothing refers to {sort}/{name}"


def test_every_endpoint_and_page_is_there_with_its_right() -> None:
    app = create_app(Service(Path("nowhere")))
    document = describe(app.endpoints, app.pages)
    assert list(document["paths"]) == [endpoint.path for endpoint in app.endpoints] + [page.path for page in app.pages]
    for endpoint in app.endpoints:
        assert document["paths"][endpoint.path]["post"].get("x-required-action") == endpoint.action
    for page in app.pages:
        operation = document["paths"][page.path]["get"]
        assert operation.get("x-required-action") == page.action
        assert (operation.get("security") == []) == (page.action is None)
    assert as_text(document) == as_text(describe(app.endpoints, app.pages))


def test_every_field_is_explained(document: Json) -> None:
    for name, schema in document["components"]["schemas"].items():
        for field, each in schema.get("properties", {}).items():
            assert each.get("description"), f"{name}.{field}: say what it is, with about(…) in contract/, or in server/openapi_fields.py"
    for path, operation in operations(document):
        for parameter in operation["parameters"]:
            assert resolved(document, parameter)["description"], f"{path}: {parameter}"


def test_a_value_that_may_be_null_is_no_choice_without_it(document: Json) -> None:
    fields = [(name, field) for name, each in document["components"]["schemas"].items() for field in each.get("properties", {}).values()]
    assert [name for name, field in fields if "enum" in field and "anyOf" in field and None not in field["enum"]] == []


def test_every_operation_has_a_name_of_its_own(document: Json) -> None:
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*|openapi_json", name) for name in names), names


def test_problems_have_exactly_the_codes_of_their_status(document: Json) -> None:
    for response in document["components"]["responses"].values():
        (content,) = response["content"].values()
        said = content["schema"]["allOf"][1]["properties"]
        assert {KINDS[code].status for code in said["code"]["enum"]} == {said["status"]["const"]}
        assert ("Retry-After" in response["headers"]) == (said["status"]["const"] == 429)
    codes = {code for response in document["components"]["responses"] for code in response.split(".")[1:]}
    assert set(KINDS) - codes == {"not_found", "method_not_allowed", "not_here"}, "codes that no operation names"


def test_a_call_that_only_looks_cannot_end_unknown() -> None:
    async def handle(request: Request) -> bytes:
        raise AssertionError

    reads = Endpoint("/v1/a", "read", handle, Call, shapes.Done, "s", ("queue_not_found",))
    manages = Endpoint("/v1/a", "manage", handle, Call, shapes.Done, "s")
    assert "outcome_unknown" not in codes_of(reads)
    assert "queue_not_found" in codes_of(reads)
    assert "outcome_unknown" in codes_of(manages)
    assert codes_of(Page("/a", None, None, "s")) == ["internal"]


def test_what_a_decoder_asks_for_is_in_the_schema(document: Json) -> None:
    schemas = document["components"]["schemas"]
    produce = schemas["ProduceCall"]
    assert produce["required"] == ["queue_name", "items"]
    assert produce["additionalProperties"] is False
    assert (produce["properties"]["items"]["minItems"], produce["properties"]["items"]["maxItems"]) == (1, MAX_ITEMS_JSON)
    assert schemas["LeaseCall"]["properties"]["max_partitions"]["maximum"] == MAX_PARTITIONS
    item_id = schemas["ExplainCall"]["properties"]["id"]["anyOf"][0]["pattern"]
    assert re.search(item_id, "k7f3q2ma.0.1042")
    for wrong in ("k7f3q2ma.0.L17", "k7f3q2ma.00.1", "k7f3q2ma.0.01", "k7f3q2ma.1234567890.1", "a.b.0.1"):
        assert not re.search(item_id, wrong), wrong
    duration = schemas["LeaseCall"]["properties"]["request_timeout"]["pattern"]
    assert re.search(duration, "1h30m")
    assert not re.search(duration, "-1s")


def test_a_document_of_the_table_alone_shows_arrow_and_its_query_string(document: Json) -> None:
    produce = document["paths"]["/v1/queue.produce"]["post"]
    assert set(produce["requestBody"]["content"]) == {"application/json", "application/vnd.apache.arrow.stream"}
    in_query = {each["name"]: each for each in produce["parameters"] if each.get("in") == "query"}
    assert set(in_query) >= {"queue_name", "request_timeout", "idempotency_key"}
    assert not any(each["required"] for each in in_query.values()), "a JSON call has no query string"
    lease = document["paths"]["/v1/queue.lease"]["post"]["responses"]["200"]
    assert set(lease["content"]) == {"application/json", "application/vnd.apache.arrow.stream"}


def test_a_server_that_asks_for_keys_refuses_as_the_document_says(document: Json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICEWAY_SERVER__AUTH", "keys")
    with ServerProcess(tmp_path / "data") as served, httpx.Client(base_url=served.url) as client:
        for path, operation in operations(document):
            method = "POST" if "requestBody" in operation else "GET"
            if "security" in operation:
                assert client.get(path).status_code == 200, path
                continue
            answer = client.request(method, path, json={} if method == "POST" else None)
            assert answer.status_code == 401, path
            said = resolved(document, operation["responses"]["401"])["content"][answer.headers["content-type"]]["schema"]["allOf"]
            assert answer.json()["code"] in said[1]["properties"]["code"]["enum"]
            assert set(resolved(document, said[0])["required"]) <= set(answer.json())
            assert "403" in operation["responses"], path


# -- pages ------------------------------------------------------------------------------------------------------------


class Seen(HTMLParser):
    """The elements, anchors and links of a page; fails on an element that is closed out of turn."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.anchors: list[str] = []
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self._open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            assert name != "style"
            if name == "id":
                self.anchors.append(str(value))
            elif name in ("href", "src"):
                self.links.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.mark.parametrize("path", ["/docs", "/docs/errors"])
def test_a_page_needs_no_script_and_nothing_from_elsewhere(server: Running, path: str) -> None:
    answer = server.http.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    seen = Seen(answer.text)
    assert not seen.tags & {"script", "iframe", "img", "link", "form", "object"}
    assert len(set(seen.anchors)) == len(seen.anchors) > 20
    for link in seen.links:
        page, _, anchor = link.partition("#")
        if page in ("", path):
            assert anchor in seen.anchors or not anchor, link
        else:
            there = server.http.get(page)
            assert there.status_code == 200, link
            assert not anchor or f'id="{anchor}"' in there.text, link


def test_the_page_shows_every_operation_and_no_text_as_markup(document: Json) -> None:
    document = {**document, "info": {**document["info"], "title": "<script>", "description": "<b onclick=x>"}}
    page = api_page(document).decode()
    assert "<script>" not in page
    assert "<b onclick" not in page
    seen = Seen(page)
    assert {operation["operationId"] for _, operation in operations(document)} <= set(seen.anchors)


def test_a_problem_s_type_leads_to_its_explanation(server: Running) -> None:
    page, _, anchor = server.post("queues.info", queue_name="nowhere").json()["type"].partition("#")
    there = server.http.get(page)
    assert there.status_code == 200
    assert anchor == "queue_not_found"
    assert f'<section id="{anchor}">' in there.text
    assert KINDS[anchor].title in there.text


def test_a_readiness_page_is_described_with_both_statuses(document: Json) -> None:
    assert {"200", "503"} <= set(document["paths"]["/readyz"]["get"]["responses"])
    assert msgspec.json.decode(b'{"ready":true,"problems":[]}', type=shapes.Ready).ready
