"""Requests generated from the served OpenAPI document, some hundreds of them; `make fuzz` sends 30,000."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from schemathesis.core.failures import FailureGroup

from tests.fuzz.openapi_requests import Campaign, server

EACH = 4


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as found:
        yield found


@pytest.fixture
def document(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repository / "docs" / "reference" / "openapi.json").read_bytes())
    return found


def test_every_answer_is_one_that_the_document_names(url: str) -> None:
    campaign = Campaign(url)
    campaign.run(EACH)
    by_path = Counter[str]()
    for (path, _), count in campaign.answers.items():
        by_path[path] += count
    assert set(by_path) == set(campaign.document["paths"])
    # What a page takes has no wrong form, so it is asked three times in four.
    assert min(by_path.values()) >= EACH * 3 // 4
    good = sum(count for (_, status), count in campaign.answers.items() if status == 200)
    assert good > sum(by_path.values()) / 3, "too few requests got past the checks of their fields"


def test_a_status_that_the_document_does_not_name_is_found(url: str, document: dict[str, Any]) -> None:
    del document["paths"]["/v1/queues.info"]["post"]["responses"]["404"]
    document["paths"] = {"/v1/queues.info": document["paths"]["/v1/queues.info"]}
    with pytest.raises(FailureGroup, match="404"):
        Campaign(url, document=document).run(40)


def test_an_answer_that_is_not_of_its_type_is_found(url: str, document: dict[str, Any]) -> None:
    document["components"]["schemas"]["QueuePage"]["properties"]["next"] = {"type": "integer"}
    document["paths"] = {"/v1/queues.list": document["paths"]["/v1/queues.list"]}
    with pytest.raises(FailureGroup, match="Response violates schema"):
        Campaign(url, document=document).run(20)


def test_a_wrong_request_that_is_taken_is_found(url: str, document: dict[str, Any]) -> None:
    document["components"]["schemas"]["ListCall"]["required"] = ["pivot"]
    document["paths"] = {"/v1/queues.list": document["paths"]["/v1/queues.list"]}
    with pytest.raises(FailureGroup, match="Schema-violating request accepted"):
        Campaign(url, document=document).run(200)
