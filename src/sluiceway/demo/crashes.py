"""Crashes for `--kill`: victims and moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluiceway.kernel.errors import invalid


@dataclass(frozen=True, slots=True)
class View:
    """Progress of the run. `settled` items are completed or dead."""

    rows: int
    produced: int
    settled: int
    is_ingested: bool
    is_batch_open: bool


@dataclass(frozen=True, slots=True)
class Kill:
    """A crash: `victim` is killed when `is_due`; `when` describes the moment."""

    victim: str
    when: str
    is_due: Callable[[View], bool]


def _in_mid_ingest(view: View) -> bool:
    return not view.is_ingested and view.rows * 0.25 <= view.produced < view.rows * 0.9


def _in_mid_processing(view: View) -> bool:
    return view.is_batch_open and view.rows * 0.25 <= view.settled < view.rows * 0.9


def _in_mid_batch(view: View) -> bool:
    return view.is_batch_open and view.rows * 0.5 <= view.settled < view.rows * 0.9


KILLS = {
    "server-ingest": Kill("server", "in mid-ingest", _in_mid_ingest),
    "server-process": Kill("server", "in mid-processing", _in_mid_processing),
    "driver": Kill("driver", "in mid-batch", _in_mid_batch),
}


def parse_kills(text: str | None) -> list[Kill]:
    """Parse a comma-separated list of names, or `all`. Raises `invalid_request` for an unknown name."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if "all" in names:
        return list(KILLS.values())
    for name in names:
        if name not in KILLS:
            raise invalid("kill", f"{name[:40]!r} is not one of {', '.join(KILLS)}, all")
    return [KILLS[name] for name in dict.fromkeys(names)]
