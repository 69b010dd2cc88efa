"""Objects of a bucket, through obstore: S3 and servers that speak its language, Google Cloud Storage, Azure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import md5
from pathlib import Path
from typing import Any, Final

import obstore
from obstore import store
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from sluiceway.ports.object_store import Object, UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError

NOT_DONE = (
    FileNotFoundError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
"""Errors of a write that surely did not happen. All others may come after it has: a time-out, a broken connection, a server's error."""
CONFLICT = "<Code>ConditionalRequestConflict<"
"""In S3's answer (409) to one of two writes at the same time: whether there is such an object, or will be, it does not say."""
EXPIRED = "<Code>ExpiredToken<"
"""In S3's answer to credentials that have expired. The library has no error of its own for it, since its status is 400."""

ANSWERED_IN, LONGEST = 3.0, 30.0
"""Seconds after which a small write counts as not answered: at first, and at most (doubling, until one is done). It is repeated on
another connection: the first may have died without a word, and a journal has one write under way."""
SLOWEST: Final = 256 << 10
"""Bytes of a larger write for which it has a second more."""

CHECKED: Final = 1 << 20
"""Bytes of an object up to which a read is checked against its tag. Larger ones are journal entries and checkpoints, which are never
replaced, or the meta store of a very large cluster."""
AGAIN: Final = 0.05
"""Seconds until a read that does not fit its tag is repeated."""

CHECK_PAUSE: Final = 0.005
"""Seconds between two looks at the library's threads, in which they may enter Python."""
CHECKS: Final = 3
"""Looks in a row at which they rest."""
MAX_CHECKS: Final = 60
"""Looks at most: others may use the library still."""

_CLIENT: dict[str, Any] = {
    "connect_timeout": timedelta(seconds=3),
    "timeout": timedelta(seconds=LONGEST),
    "pool_idle_timeout": timedelta(seconds=20),
}
"""Reads and writes have shorter time limits; these end what callers have given up."""


def in_s3(bucket: str, prefix: str, *, region: str, endpoint: str, access_key_id: str, secret_access_key: str) -> BucketObjects:
    """A bucket of S3 or of a server with its interface. Empty settings come from the environment. Raises ValueError."""
    given = {"region": region, "endpoint": endpoint, "access_key_id": access_key_id, "secret_access_key": secret_access_key}
    return _opened(store.S3Store, bucket, prefix, given)


def in_gcs(bucket: str, prefix: str, *, service_account: str) -> BucketObjects:
    """A bucket of Google Cloud Storage. Raises ValueError."""
    return _opened(store.GCSStore, bucket, prefix, {"service_account": service_account})


def in_azure(container: str, prefix: str, *, account: str, access_key: str, endpoint: str) -> BucketObjects:
    """A container of Azure Blob Storage, of another Azure cloud or of an emulator. Empty settings come from the environment. Raises
    ValueError."""
    given = {"account_name": account, "account_key": access_key, "endpoint": endpoint}
    return _opened(store.AzureStore, container, prefix, given)


def _opened(kind: Callable[..., Any], bucket: str, prefix: str, given: dict[str, str]) -> BucketObjects:
    client = _CLIENT | {"allow_http": given.get("endpoint", "").startswith("http://")}
    # The library repeats nothing: see BucketObjects.
    options = {"retry_config": {"max_retries": 0}, "client_options": client, **{name: text for name, text in given.items() if text}}
    try:
        return BucketObjects(kind(bucket, prefix=prefix.strip("/") or None, **options))
    except BaseError as error:
        raise ValueError(_words(error)) from None


class BucketObjects:
    """ObjectStore over one of obstore's stores, which must not repeat requests by itself: a repetition below would hide a lost answer."""

    def __init__(self, bucket: Any) -> None:
        self._store = bucket
        self._tags_are_digests = False
        """Whether tags are MD5 digests, as S3's are unless it encrypts with keys of a key service."""
        self._answered_in = ANSWERED_IN

    async def get(self, name: str) -> Object | None:
        found = await self._get(name)
        if found is None or self._fits(found):
            return found
        # A gateway may answer a read that meets a write with the tag of the one version and the data of the other.
        await asyncio.sleep(AGAIN)
        again = await self._get(name)
        if again == found:
            self._tags_are_digests = False
        elif again is not None and not self._fits(again):
            raise StoreUnavailableError(f"{name} was read while it was written: its data do not fit its tag")
        return again

    def _fits(self, found: Object) -> bool:
        return not self._tags_are_digests or len(found.data) > CHECKED or _digest(found.data) == found.tag

    async def _get(self, name: str) -> Object | None:
        try:
            with _reading():
                found = await obstore.get_async(self._store, name)
                return Object(bytes(await found.bytes_async()), _tag(found.meta))
        except FileNotFoundError:
            return None

    async def get_range(self, name: str, start: int, length: int) -> bytes | None:
        try:
            with _reading():
                return bytes(await obstore.get_range_async(self._store, name, start=start, length=length))
        except FileNotFoundError:
            return None

    async def create(self, name: str, data: bytes) -> bool:
        try:
            put = await self._put(name, data, "create")
        except AlreadyExistsError as error:
            if CONFLICT in str(error):
                raise StoreUnavailableError(_words(error)) from error
            return False
        self._tags_are_digests = _tag(put) == _digest(data)
        return True

    async def replace(self, name: str, data: bytes, tag: str) -> str | None:
        try:
            e_tag, _, version = tag.partition("\n")
            put = await self._put(name, data, {name: text for name, text in (("e_tag", e_tag), ("version", version)) if text})
        except PreconditionError:
            return None
        except AlreadyExistsError as error:
            # S3's answer (409) to one of two writes at the same time. The tag may be the same still.
            raise StoreUnavailableError(_words(error)) from error
        return _tag(put)

    async def _put(self, name: str, data: bytes, mode: Any) -> Any:
        patience = self._answered_in
        with _writing():
            try:
                async with asyncio.timeout(patience + len(data) / SLOWEST):
                    put = await obstore.put_async(self._store, name, data, mode=mode, use_multipart=False)
            except TimeoutError:
                # New credentials may be what takes so long, and each write begins to ask for them anew.
                self._answered_in = min(2 * patience, LONGEST)
                raise
            self._answered_in = ANSWERED_IN
            return put

    async def list(self, prefix: str, after: str) -> Sequence[str]:
        with _reading():
            found: list[str] = []
            async for piece in obstore.list(self._store, prefix, offset=after, chunk_size=1_000):
                found += [each["path"] for each in piece]
        # Some servers, such as S3 Express, neither sort nor know where to begin.
        return sorted(name for name in found if name > after)

    async def sizes(self, prefix: str) -> Mapping[str, int]:
        with _reading():
            found: dict[str, int] = {}
            async for piece in obstore.list(self._store, prefix, chunk_size=1_000):
                found |= {each["path"]: each["size"] for each in piece}
        return found

    async def delete(self, names: Sequence[str]) -> None:
        try:
            with _reading():
                await obstore.delete_async(self._store, list(names))
        except FileNotFoundError:
            # Not all stores ignore missing ones.
            for name in names:
                try:
                    with _reading():
                        await obstore.delete_async(self._store, name)
                except FileNotFoundError:
                    continue

    async def close(self) -> None:
        """Wait until the library's threads rest. One of them may still be on its way out of Python after the last answer, and would abort
        a process that ends then. Its connections are closed with the object."""
        resting = 0
        for _ in range(MAX_CHECKS):
            await asyncio.sleep(CHECK_PAUSE)
            resting = resting + 1 if _threads_rest() else 0
            if resting == CHECKS:
                return


@contextmanager
def _reading() -> Iterator[None]:
    """Every error but a missing object means that the store is not available."""
    try:
        yield
    except FileNotFoundError as error:
        _check_bucket(error)
        raise
    except (BaseError, OSError, ValueError) as error:
        raise StoreUnavailableError(_words(error)) from error


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except (AlreadyExistsError, PreconditionError):
        raise
    except NOT_DONE as error:
        raise StoreUnavailableError(_words(error)) from error
    except TimeoutError as error:
        raise UnknownWriteError("a write had no answer in time") from error
    except (BaseError, OSError) as error:
        if EXPIRED in str(error):
            raise StoreUnavailableError(_words(error)) from error
        raise UnknownWriteError(_words(error)) from error


def _threads_rest() -> bool:
    """Whether none of the library's threads runs or waits for a processor. Only Linux tells."""
    for stat in Path("/proc/self/task").glob("*/stat"):
        # A thread may have ended.
        with suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if name.startswith("tokio") and rest.split()[0] == "R":
                return False
    return True


def _tag(about: Any) -> str:
    """The tag of a version: Google Cloud Storage compares its number, the others its ETag."""
    return f"{about['e_tag'] or ''}\n{about['version'] or ''}"


def _digest(data: bytes) -> str:
    return f'"{md5(data, usedforsecurity=False).hexdigest()}"\n'


def _check_bucket(error: FileNotFoundError) -> None:
    """Raise StoreUnavailableError if it is the bucket that is missing, and not an object: nothing is known of its objects then."""
    if any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")):
        raise StoreUnavailableError(_words(error)) from error


def _words(error: Exception) -> str:
    """The error in one line, without the source's own debugging form."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split())[:300]
