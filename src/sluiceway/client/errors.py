"""What a call that did not end *done* raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluiceway.client.answers import Ignored
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import KINDS, ErrorKind, SluicewayError


class CallError(SluicewayError):
    """A call that was *refused* or whose outcome is *unknown*.

    `code` is one of the server's stable codes (`docs/errors.md`); a server newer than this client may send others. `retryable` is
    what the server said, `field` the field of the request at fault, `request_id` finds the call in the server's log.
    `unavailable` is also raised when the server could not be reached (nothing was sent), and `outcome_unknown` when the
    connection broke or timed out after sending. With `stale_ids`, `ignored` lists what was ignored (the first 1,000); the rest was done.
    `retry_after` is how many milliseconds the server asks to wait before the call is repeated, if it said so.
    """

    def __init__(
        self,
        code: str,
        detail: str,
        field: str | None = None,
        request_id: str | None = None,
        kind: ErrorKind | None = None,
        ignored: Sequence[Ignored] = (),
        retry_after: Millis | None = None,
    ) -> None:
        super().__init__(code, detail, field)
        self.request_id = request_id
        self._kind = kind or KINDS[code]
        self.ignored = ignored
        self.retry_after = retry_after

    @property
    def kind(self) -> ErrorKind:
        return self._kind

    @property
    def outcome_unknown(self) -> bool:
        """The call may have taken effect. When false, it surely did nothing (or, with `stale_ids`, what it did is known)."""
        return self.code in ("outcome_unknown", "internal")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.code, self.detail, self.field, self.request_id, self._kind, self.ignored, self.retry_after))
