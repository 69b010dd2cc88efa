from __future__ import annotations

import pickle
import runpy
from pathlib import Path

import pytest

from sluiceway.kernel.errors import KINDS, SluicewayError, invalid


def test_the_pages_of_errors_are_current(repository: Path) -> None:
    tool = runpy.run_path(str(repository / "tools" / "docs_errors.py"))
    docs = repository / "docs" / "reference"
    pages = {str(path.relative_to(docs)): path.read_text(encoding="utf-8") for path in (docs / "errors.md", *docs.glob("errors/*"))}
    assert pages == tool["render"](), "run: python tools/docs_errors.py"


@pytest.mark.parametrize("code", KINDS)
def test_every_code_says_when_it_happens_and_what_to_do(code: str) -> None:
    kind = KINDS[code]
    assert not kind.title.endswith(".")
    assert kind.when.endswith(".")
    assert kind.advice.endswith(".")


@pytest.mark.parametrize("code", KINDS)
def test_an_error_survives_the_way_between_processes(code: str) -> None:
    error = SluicewayError(code, "what happened", "items")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, copy.detail, copy.field, copy.retryable) == (code, "what happened", "items", KINDS[code].retryable)


@pytest.mark.parametrize("code", KINDS)
def test_a_status_is_an_error_and_of_the_4xx_only_421_and_429_promise_success_by_repeating(code: str) -> None:
    kind = KINDS[code]
    assert 400 <= kind.status <= 599
    if kind.retryable:
        assert kind.status in {421, 429, 503, 504}


def test_an_unknown_outcome_may_be_repeated() -> None:
    assert SluicewayError("outcome_unknown", "timed out").retryable


def test_a_refusal_names_the_field() -> None:
    error = invalid("batch_size", "expected 1 to 10,000")
    assert (error.code, error.field, str(error)) == ("invalid_request", "batch_size", "batch_size: expected 1 to 10,000")
