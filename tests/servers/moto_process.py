"""The process of `moto_server.MotoServer`: with `--as-it-is` or without it serves until it is ended, and says its port first."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from moto.kinesis import models, utils
from moto.moto_server import werkzeug_app
from moto.s3 import responses
from werkzeug.serving import make_server

NUMBERS = itertools.count(49_600_000 * 10**48 + 1)
"""As long as the real ones are; they rise throughout the stream."""
MUTEX = threading.RLock()


def mend() -> None:
    """moto 5.2.5 gives new records to the closed parent, moves or copies a parent's records into its children, gives two records that
    come at once one number, and never says that a closed shard has been read to its end. Its S3 lets several create one object at once."""
    mend_creations(responses.S3Response)
    mend_shards(models.Shard)
    mend_streams(models.Stream)
    mend_calls(models.KinesisBackend)


def mend_creations(objects: Any) -> None:
    objects.put_object = locked(objects.put_object)


def mend_shards(shards: Any) -> None:
    born, told = shards.__init__, shards.to_json

    def begin(self: Any, *args: Any, **fields: Any) -> None:
        born(self, *args, **fields)
        self.first, self.last = next(NUMBERS), None

    def to_json(self: Any) -> dict[str, Any]:
        span = {"StartingSequenceNumber": str(self.first)}
        return {**told(self), "SequenceNumberRange": span if self.last is None else span | {"EndingSequenceNumber": str(self.last)}}

    def put_record(self: Any, partition_key: str, data: str, explicit_hash_key: str) -> str:
        assert self.is_open
        number = next(NUMBERS)
        self.records[number] = models.Record(partition_key, data, number, explicit_hash_key)
        return str(number)

    shards.__init__, shards.put_record, shards.to_json = begin, put_record, to_json


def mend_streams(streams: Any) -> None:
    split_shard, merge_shards = streams.split_shard, streams.merge_shards

    def shard_for(self: Any, partition_key: str, explicit_hash_key: str) -> Any:
        key = int(explicit_hash_key) if explicit_hash_key else int(hashlib.md5(partition_key.encode()).hexdigest(), 16)
        return next(each for each in self.shards.values() if each.is_open and each.starting_hash <= key <= each.ending_hash)

    def put_record(self: Any, partition_key: str, explicit_hash_key: str, data: str) -> tuple[str, str]:
        with MUTEX:
            shard = self.get_shard_for_key(partition_key, explicit_hash_key)
            return shard.put_record(partition_key, data, explicit_hash_key), shard.shard_id

    @contextlib.contextmanager
    def keeping(shards: list[Any]) -> Iterator[None]:
        """Their records stay theirs; whoever is closed by what happens has a last number afterwards."""
        kept = [shard.records for shard in shards]
        for shard in shards:
            shard.records = OrderedDict()
        try:
            yield
        finally:
            for shard, records in zip(shards, kept, strict=True):
                shard.records = records
                if not shard.is_open and shard.last is None:
                    shard.last = next(NUMBERS)

    def split(self: Any, shard: str, hash_key: str) -> None:
        with MUTEX, keeping([self.shards[shard]]):
            split_shard(self, shard, hash_key)

    def merge(self: Any, one: str, other: str) -> None:
        with MUTEX, keeping([self.shards[one], self.shards[other]]):
            merge_shards(self, one, other)

    streams.get_shard_for_key, streams.put_record = shard_for, put_record
    streams.split_shard, streams.merge_shards = split, merge


def mend_calls(backend: Any) -> None:
    get_records = backend.get_records

    def records(self: Any, stream_arn: str | None, iterator: str, limit: int | None) -> tuple[str | None, list[Any], int]:
        with MUTEX:
            following, found, behind = get_records(self, stream_arn, iterator, limit)
            name, token, upto = utils.decompose_shard_iterator(following)
            shard = self.describe_stream(stream_arn=stream_arn, stream_name=name).shards[token]
            over = not shard.is_open and int(upto) >= max(shard.records, default=0)
            return (None if over else following), found, behind

    backend.get_records = records
    backend.get_shard_iterator, backend.list_shards = locked(backend.get_shard_iterator), locked(backend.list_shards)


def locked(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **fields: Any) -> Any:
        with MUTEX:
            return method(self, *args, **fields)

    return call


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--as-it-is", action="store_true")
    if not parser.parse_args().as_it_is:
        mend()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app), threaded=True)
    print("port", server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
