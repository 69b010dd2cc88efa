"""The error of a failed call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluiceway.client.answers import Ignored
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import KINDS, ErrorKind, SluicewayError


class CallError(SluicewayError):
    """A call that was *refused* or whose outcome is *unknown*.

    `code` is one of the server's stable codes (`docs/reference/errors.md`); a newer server may send others. `retryable` is the server's
    word on whether a repeat can succeed. `field` is the invalid field of the request. `request_id` finds the call in the server's log.
    The client itself raises `unavailable` if it could not reach the server (nothing was sent), and `outcome_unknown` if the connection
    broke or timed out after sending. With `stale_ids`, `ignored` lists the ignored ids (the first 1,000); the others were settled.
    `retry_after` is the number of milliseconds that the server asks to wait before a repeat, if it does.
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
        """Whether the call may have taken effect. If false, it did nothing, or, with `stale_ids`, its effect is known."""
        return self.code in ("outcome_unknown", "internal")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.code, self.detail, self.field, self.request_id, self._kind, self.ignored, self.retry_after))
