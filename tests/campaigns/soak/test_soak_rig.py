"""The soak imports nothing of the product; its leaks can be planted; its clients keep their pace; its page says what grows."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.campaigns.blackbox.operation_log import payload_of
from tests.campaigns.blackbox.planted_bugs import SOURCE, PlantedBug
from tests.campaigns.soak import __main__ as command
from tests.campaigns.soak import soak_page
from tests.campaigns.soak.planted_leaks import LEAKS
from tests.campaigns.soak.soak_clients import JOBS, MOVING, CallTimes, Consumer, Pace, Producer, Scene, told
from tests.campaigns.soak.soak_faults import Settings
from tests.campaigns.soak.soak_record import Beat, Calls, SoakRecord, all_series


def test_it_imports_nothing_of_the_product() -> None:
    look = "import sys; import tests.campaigns.soak.__main__; print([name for name in sys.modules if name.startswith('sluiceway')])"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_a_leak_can_be_planted_and_has_a_series_that_shows_it(leak: PlantedBug) -> None:
    for edit in leak.edits:
        assert (SOURCE / edit.file).read_text().count(edit.text) == 1
    assert set(leak.found_as) <= {each.name for each in all_series(SoakRecord())}


def test_clients_keep_their_pace_together_and_make_up_for_half_a_second() -> None:
    pace = Pace()
    assert pace.take(100.0) == 0.0
    pace.rate = 10.0
    # Those of the half second before at once, as after a fault; then one each tenth of a second.
    assert [pace.take(100.0) for _ in range(8)] == pytest.approx([0.0] * 6 + [0.1, 0.2])
    assert pace.take(100.3) == pytest.approx(0.0)
    assert [pace.take(200.0) for _ in range(8)] == pytest.approx([0.0] * 6 + [0.1, 0.2])


def test_call_times_are_taken_once() -> None:
    times = CallTimes()
    for each in range(100):
        times.add("lease", each / 1_000)
    times.failed()
    assert times.take() == ({"lease": (100, 50.0, 99.0)}, 1)
    assert times.take() == ({}, 0)
    assert times.done == 100


def test_an_item_tells_its_queue_and_its_number() -> None:
    assert told(payload_of("jobs.17")) == ("jobs", 17)
    assert told(payload_of("jobs.17")[:-1] + "?") == ("", None)
    assert told("jobs.17|") == ("", None)


class Door:
    name, url = "server", "http://server"


def scene(answers: dict[str, Any], folder: Path) -> Scene:
    """A server that gives each call this status and body."""

    def answer(request: httpx.Request) -> httpx.Response:
        status, body = answers[request.url.path.removeprefix("/v1/")]
        return httpx.Response(status, json=body)

    return Scene(httpx.AsyncClient(transport=httpx.MockTransport(answer)), Door(), 1, [], folder)


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        ((200, {"duplicates": None}), "stored"),
        ((503, {"code": "unavailable", "retryable": True}), ""),
        ((504, {"code": "outcome_unknown", "retryable": True}), "unknown"),
    ],
)
def test_a_producer_books_what_it_was_told(tmp_path: Path, answer: tuple[int, Any], left: str) -> None:
    class Plain(Producer):
        is_safe = False

    stage = scene({"queue.produce": answer}, tmp_path)
    asyncio.run(Plain(stage, "p", JOBS).work())
    book = stage.books[JOBS]
    stored = book.items if left == "stored" else 0
    none = dict.fromkeys(("moved_in", "completed", "dead", "redriven", "moved", "total", "transferring"), 0)
    found = book.close({JOBS: {**none, "produced": stored, "cleared": stored}})
    # Nobody has completed what was stored.
    assert bool(found) == (left == "stored")
    assert book.outstanding == (book.items if left else 0)
    assert stage.findings == []


def test_a_consumer_books_what_it_completes(tmp_path: Path) -> None:
    stage = scene({"queue.complete": (200, {"completed": 1, "ignored": [{"id": "a.0.1", "reason": "expired"}]})}, tmp_path)
    numbers = stage.books[MOVING].new(2)
    consumer = Consumer(stage, "c", MOVING)
    items = [
        {"id": f"a.0.{number}", "lease_id": "a.0.L1", "bytes": base64.b64encode(payload_of(f"{MOVING}.{number}").encode()).decode()}
        for number in numbers
    ]
    taken = consumer._taken(items)
    assert [each.number for each in taken] == [0, 1]
    asyncio.run(consumer._complete(taken))
    stage.books[MOVING].completed([1])
    assert stage.books[MOVING].wrong == []
    stage.books[MOVING].completed([0])
    assert len(stage.books[MOVING].wrong) == 1


def test_an_answer_that_a_call_must_not_get_is_a_finding(tmp_path: Path) -> None:
    stage = scene({"queue.stats": (500, {"code": "internal", "retryable": False, "detail": "why"})}, tmp_path)
    with pytest.raises(AssertionError):
        asyncio.run(stage.counters(JOBS))
    assert stage.findings == ["stats: unexpected: 500 internal: why"]


def test_a_restart_takes_the_last_valid_configuration() -> None:
    settings = Settings()
    before = settings.text
    assert settings.broken != before == settings.text
    settings.change()
    assert settings.text != before


def measured(leak: float = 0.0, drift: float = 0.0, slower: float = 0.0) -> SoakRecord:
    """Ten minutes, in which memory grows by so many bytes a second, and latencies and the time of a fixed piece of work by so many
    milliseconds."""
    found = SoakRecord(rate=50.0, full_rate=100.0, seed=1, warm_up=20.0, length=600.0, lives={1: 0.0, 2: 300.0})
    for at in range(600):
        life = 1 if at < 300 else 2
        gauges = {"series": 100.0, "items": 20.0, "lag sum": at / 1_000, "lag count": float(at)} if at % 5 == 0 else {}
        memory = round(200e6 + leak * (at % 300))
        seldom = at % 5 == 0
        found.beats.append(
            Beat(
                at=float(at),
                life=life,
                resident=memory,
                anonymous=memory,
                handles=40,
                sockets=20,
                threads=15,
                processor=at / 10,
                calls=50 * at,
                machine=0.5,
                yardstick=1.0 + slower * (at % 300),
                proportional=memory,
                files=30 if seldom else None,
                stored=10_000_000 if seldom else None,
                gauges=gauges,
            )
        )
    for at in range(0, 600, 5):
        took = (50, 2.0 + drift * (at % 300), 9.0)
        found.calls.append(Calls(float(at), dict.fromkeys(("produce", "lease", "complete", "retry", "stats"), took), 0))
    return found


def test_a_page_says_that_nothing_grows(tmp_path: Path) -> None:
    record = measured()
    result = soak_page.judged(record)
    assert result.is_good
    assert not result.undecided
    page = soak_page.write("Soak", record, result, tmp_path).read_text()
    assert "0 of 16 figures grow too fast, 0 findings" in page
    for picture in ("course.svg", "slopes.svg"):
        assert picture in page
        assert (tmp_path / picture).read_text().count("<path") > 10


def test_a_page_says_what_grows(tmp_path: Path) -> None:
    record = measured(1_000_000.0)
    record.findings.append("lost: jobs 1 was stored, and is nowhere")
    result = soak_page.judged(record)
    assert not result.is_good
    assert result.over == ["memory"]
    page = soak_page.write("Soak", record, result, tmp_path).read_text()
    assert "1 of 16 figures grow too fast, 1 findings" in page
    assert "+3,600 MB/h" in page
    assert "lost: jobs 1" in page


def test_latencies_that_grow_are_not_excused_by_a_machine_that_does_not_slow_down() -> None:
    assert soak_page.judged(measured(drift=0.01)).over == [f"{kind}: median" for kind in ("produce", "lease", "complete", "retry")]


def test_a_machine_that_slows_down_excuses_latencies_and_nothing_else() -> None:
    result = soak_page.judged(measured(leak=1_000_000.0, drift=0.01, slower=0.005))
    assert result.over == ["memory"]
    assert result.undecided == [f"{kind}: median" for kind in ("produce", "lease", "complete", "retry")]


@pytest.mark.crash
@pytest.mark.slow
def test_a_soak_of_a_minute_loses_nothing_and_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = command.main(["--minutes", "1.2", "--seed", "5", "--folder", str(tmp_path / "kept")])
    assert code == 0, capsys.readouterr().out
    assert command.main(["judge", str(tmp_path / "kept")]) == 0


@pytest.mark.crash
@pytest.mark.slow
def test_a_planted_leak_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["planted", "kept-requests", "--folder", str(tmp_path / "kept")]) == 0, capsys.readouterr().out
