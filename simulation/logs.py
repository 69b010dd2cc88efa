"""Log capture during a history: an unexpected exception that the code under test logs fails the history."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from simulation.promises import BrokenPromiseError, InjectedMistakeError


class _Ear(logging.Handler):
    def __init__(self, hear: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(record)


@contextmanager
def listening(note: Callable[[str], None], fail: Callable[[BaseException], None]) -> Iterator[None]:
    """Pass each log message to `note` during the block, and a logged exception to `fail` too, unless it was injected."""

    def hear(record: logging.LogRecord) -> None:
        note(record.getMessage())
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, InjectedMistakeError):
            mistake = BrokenPromiseError(f"logged: {record.getMessage()}: {error!r}")
            mistake.__cause__ = error
            fail(mistake)

    logger, ear = logging.getLogger("sluiceway"), _Ear(hear)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(ear)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(ear)
        logger.setLevel(level)
        logger.propagate = propagate
