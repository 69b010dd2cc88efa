"""Damage check of a SQLite write-ahead log, as distinct from the torn end that a crash leaves.

SQLite reads its log up to the first frame with a bad checksum and silently forgets the rest. docs/adr/0032-damaged-logs.md explains what
distinguishes the two, and what cannot be distinguished.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import apsw
import numpy as np
import numpy.typing as npt

from sluiceway.ports.partition_store import DamagedError

_HEADER, _FRAME_HEADER = 32, 24
_WORDS = {0x377F0682: "<u4", 0x377F0683: ">u4"}
"""The log's magic number tells the byte order of its checksums."""
_CHUNK = 256 << 10
"""Bytes per read: with larger chunks, allocation dominates."""

Words = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.bool_]


def check_log(db: apsw.Connection, what: str) -> None:
    """Check the log before a connection's first statement. Raises DamagedError, whose message starts with `what`; the log then survives
    closing `db`. Also raises apsw.Error and OSError."""
    path = Path(db.filename)
    if find_damage(path) is None:
        return
    # Otherwise closing would copy what precedes the damage into the database, and remove the log.
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    # On a shared file another process may have been writing during the check. Not under this lock.
    db.execute("BEGIN IMMEDIATE")
    damage = find_damage(path)
    db.execute("ROLLBACK")
    if damage is not None:
        raise DamagedError(f"{what}: {damage}")
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)


def find_damage(database: Path) -> str | None:
    """Describe the damage in that database's log; None if it is whole, torn at its end, or missing. Raises OSError."""
    log = database.with_name(f"{database.name}-wal")
    try:
        if database.stat().st_size == 0:
            # SQLite removes the log of an empty database, which belonged to an earlier database.
            return None
        with log.open("rb") as file:
            kept = _damaged_from(file, database)
    except FileNotFoundError:
        return None
    if kept is None:
        return None
    return (
        f"the log {log} is damaged at byte {kept}, and later commits in it would be lost. Restore the file from a copy, or give up these "
        f"commits with `truncate -s {kept} {log}`, and start the server again"
    )


class _Frames(NamedTuple):
    """The frames of a log, one row each."""

    page: npt.NDArray[np.int64]
    size: Words
    """Database size in pages if the frame ends a transaction, else 0."""
    salts: Words
    stored: Words
    """The checksum stored in the frame."""
    due: Words
    """The checksum computed from its bytes and the previous stored checksum."""

    @property
    def linked(self) -> Flags:
        return np.asarray((self.stored == self.due).all(axis=1))


def _damaged_from(file: BinaryIO, database: Path) -> int | None:
    """Bytes of the log before the damage; None: undamaged."""
    header = file.read(_HEADER)
    if len(header) < _HEADER:
        return None
    magic, version, page_size, _, *rest = struct.unpack(">8I", header)
    salts, stored = np.array(rest[:2], np.uint32), np.array(rest[2:], np.uint32)
    if magic in _WORDS and version == 3_007_000 and (stored == _checksum(header[:24], _WORDS[magic])).all():
        frames = _read(file, page_size, _WORDS[magic], stored)
        frame = _damaged_frame(frames, salts, page_size)
        return None if frame is None else _HEADER + frame * (_FRAME_HEADER + page_size)
    return 0 if _holds_news(file, header, database) else None


def _damaged_frame(frames: _Frames, salts: Words, page_size: int) -> int | None:
    own = np.asarray((frames.salts == salts).all(axis=1))
    linked = frames.linked
    valid = own & linked & (frames.page > 0)
    if valid.all():
        return None
    first = int(valid.argmin())
    # A frame that continues a commit was written when that commit was in the log and synced. So the commit exists, and is not the last: a
    # crash or a failed commit leaves pieces of one transaction, which no other transaction continues.
    if (linked[first + 1 :] & own[first + 1 :] & (frames.size[first:-1] > 0)).any():
        return first
    return first if _one_bit_is_missing(frames, first, salts, valid, page_size) else None


def _one_bit_is_missing(frames: _Frames, first: int, salts: Words, valid: Flags, page_size: int) -> bool:
    """Whether the invalid frame's transaction is complete, but for one bit of this frame.

    The bit alone proves nothing: on a page written repeatedly, a torn write may leave an old sector that differs in one counter. But then
    the rest of the transaction would have been written only by chance.
    """
    after = valid[first + 1 :].copy()
    content = frames.stored[first] - frames.due[first]
    if _bits(frames.salts[first] ^ salts) + _bits(frames.stored[first] ^ frames.due[first]) == 1:
        if len(after):
            # If the flipped bit is in the stored checksum, the next frame continues from the original.
            after[0] |= bool((frames.stored[first + 1] - frames.due[first + 1] == content @ -_weights(2 + page_size // 4)[1]).all())
    elif not ((frames.salts[first] == salts).all() and _is_one_bit(content, _weights(2 + page_size // 4)[0])):
        return False
    rest = len(after) if after.all() else int(after.argmin())
    marked = bool((frames.size[first : first + 1 + rest] > 0).any())
    # The bit may be the commit mark itself: the second word of the frame.
    return marked or _is_one_bit(content, _weights(2 + page_size // 4)[0][1:2])


def _bits(words: Words) -> int:
    return sum(int(word).bit_count() for word in words)


def _is_one_bit(difference: Words, weights: Words) -> bool:
    """Whether one flipped bit in words of these weights explains the checksum difference."""
    bits = weights[:, None, :] << np.arange(32, dtype=np.uint32)[None, :, None]
    return bool(((bits == difference).all(axis=2) | (-bits == difference).all(axis=2)).any())


def _holds_news(file: BinaryIO, header: bytes, database: Path) -> bool:
    """Whether a log without a valid header has commits that the database lacks. A crash while writing the header leaves the previous log's
    frames, all of which were copied into the database first."""
    words = "<u4" if sys.byteorder == "little" else ">u4"
    # The damaged part of the header may be its checksum.
    seeds = (np.array(struct.unpack(">2I", header[24:]), np.uint32), _checksum(header[:24], words))
    with _opened(database) as db:
        page_size = int.from_bytes(db.xRead(2, 16), "big")
        # SQLite itself rejects a database file without a page size.
        return page_size >= 512 and any(_is_newer(file, _read(file, page_size, words, seed), db, page_size) for seed in seeds)


def _is_newer(file: BinaryIO, frames: _Frames, db: apsw.VFSFile, page_size: int) -> bool:
    linked = frames.linked
    begin = int(linked.argmax())
    ours = linked[begin:] & (frames.salts[begin:] == frames.salts[begin : begin + 1]).all(axis=1)
    end = len(linked) if ours.all() else begin + int(ours.argmin())
    commits = begin + np.flatnonzero(frames.size[begin:end])
    if not len(commits):
        return False
    last = {int(frames.page[n]): n for n in range(begin, int(commits[-1]) + 1)}
    for page, n in last.items():
        file.seek(_HEADER + n * (_FRAME_HEADER + page_size) + _FRAME_HEADER)
        if page <= frames.size[commits[-1]] and file.read(page_size) != db.xRead(page_size, (page - 1) * page_size):
            return True
    return False


@contextlib.contextmanager
def _opened(database: Path) -> Iterator[apsw.VFSFile]:
    """Open the file for reading, through SQLite: closing it any other way would drop this process's locks on it."""
    file = apsw.VFSFile("", str(database), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0])
    try:
        yield file
    finally:
        file.xClose()


def _read(file: BinaryIO, page_size: int, words: str, seed: Words) -> _Frames:
    """All whole frames. `seed`: the checksum that the first one continues."""
    frame = _FRAME_HEADER + page_size
    weights, power = _weights(2 + page_size // 4)
    # The rest of a frame's header, after its first two words, is not summed.
    by_word = np.concatenate((weights[:2], np.zeros((4, 2), np.uint32), weights[2:]))
    heads, sums = [np.empty((0, 6), np.uint32)], [np.empty((0, 2), np.uint32)]
    file.seek(_HEADER)
    for chunk in _chunks(file, frame):
        rows = np.frombuffer(chunk, np.uint8).reshape(-1, frame)
        heads.append(np.ascontiguousarray(rows[:, :_FRAME_HEADER]).view(">u4").astype(np.uint32))
        sums.append(np.einsum("ij,jk->ik", rows.view(words), by_word))
    head = np.concatenate(heads)
    stored = head[:, 4:]
    due = np.concatenate((seed[None, :], stored[:-1]))[: len(head)] @ power + np.concatenate(sums)
    return _Frames(head[:, 0].astype(np.int64), head[:, 1], head[:, 2:4], stored, due)


def _chunks(file: BinaryIO, frame: int) -> Iterator[bytes]:
    while len(chunk := file.read(max(1, _CHUNK // frame) * frame)) >= frame:
        yield chunk[: len(chunk) - len(chunk) % frame]


def _checksum(data: bytes, words: str) -> Words:
    return np.frombuffer(data, words).astype(np.uint32) @ _weights(len(data) // 4)[0]


@functools.cache
def _weights(count: int) -> tuple[Words, Words]:
    """SQLite's checksum of `count` words as one product: (words @ weights) + (previous checksum @ power), all modulo 2**32.

    For each pair of words it computes s0 += x0 + s1; s1 += x1 + s0.
    """
    weights = np.empty((count, 2), np.uint32)
    step = np.array([[1, 1], [1, 2]], np.uint32)
    power = np.eye(2, dtype=np.uint32)
    for at in range(count - 2, -1, -2):
        weights[at : at + 2] = np.array([[1, 1], [0, 1]], np.uint32) @ power
        power = power @ step
    return weights, power
