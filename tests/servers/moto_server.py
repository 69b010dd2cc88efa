"""A Kinesis and an S3 of the tests' own: moto's server as a process on loopback, mended where it is neither."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.server.server_process import PATIENCE
from tests.servers import pids

REGION = "eu-central-1"

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
    # What the user of this machine has is not for the tests.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
"""What boto3 needs to find in the environment of whoever reads by way of the adapter."""


class MotoServer:
    """Started by entering the block, stopped by leaving it. Its streams live as long as it does.

    `mended`: shards keep their records when they are split or merged, only open ones take new ones, numbers rise and are never given
    twice, a closed shard that was read to its end gives no way on, and of several that create an object at once one does, as with the
    real services. Otherwise moto is as it is.
    """

    def __init__(self, mended: bool = True) -> None:
        self._mended = mended

    def __enter__(self) -> MotoServer:
        command = [sys.executable, str(Path(__file__).with_name("moto_process.py"))] + ([] if self._mended else ["--as-it-is"])
        environment = {"PATH": os.environ["PATH"], "HOME": os.devnull}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("port "), f"moto's server did not start: {line!r}"
        self.port = int(line.split()[1])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def endpoint(self) -> str:
        """The URL for the option `endpoint`."""
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        """A boto3 client for Kinesis, which needs nothing from the environment. Threads may share it."""
        import boto3

        return boto3.session.Session(aws_access_key_id="tests", aws_secret_access_key="tests").client(
            "kinesis", region_name=REGION, endpoint_url=self.endpoint
        )

    def bucket(self, name: str = "tests", prefix: str = "") -> Any:
        """One of obstore's stores, for a bucket that is created if need be."""
        import obstore.store

        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")).close()
        return obstore.store.S3Store(
            name,
            prefix=prefix or None,
            access_key_id="tests",
            secret_access_key="tests",
            region=REGION,
            endpoint=self.endpoint,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )

    def pause(self) -> None:
        """It answers nobody until `resume`."""
        pids.stop(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)


def shards_of(client: Any, stream: str) -> list[dict[str, Any]]:
    """All that there are, closed ones too."""
    answer = client.list_shards(StreamName=stream)
    shards: list[dict[str, Any]] = answer["Shards"]
    while token := answer.get("NextToken"):
        answer = client.list_shards(NextToken=token)
        shards += answer["Shards"]
    return shards


def open_shards(client: Any, stream: str) -> list[dict[str, Any]]:
    """Those that take records, in the order of their hashes."""
    taking = [shard for shard in shards_of(client, stream) if "EndingSequenceNumber" not in shard["SequenceNumberRange"]]
    return sorted(taking, key=lambda shard: int(shard["HashKeyRange"]["StartingHashKey"]))


def split(client: Any, stream: str, shard: dict[str, Any]) -> None:
    """In two halves."""
    hashes = shard["HashKeyRange"]
    middle = (int(hashes["StartingHashKey"]) + int(hashes["EndingHashKey"]) + 1) // 2
    client.split_shard(StreamName=stream, ShardToSplit=shard["ShardId"], NewStartingHashKey=str(middle))


def merge(client: Any, stream: str, left: dict[str, Any], right: dict[str, Any]) -> None:
    client.merge_shards(StreamName=stream, ShardToMerge=left["ShardId"], AdjacentShardToMerge=right["ShardId"])


def width(shard: dict[str, Any]) -> int:
    return int(shard["HashKeyRange"]["EndingHashKey"]) - int(shard["HashKeyRange"]["StartingHashKey"])


def reshard(client: Any, stream: str, count: int) -> Iterator[int]:
    """Split the widest and merge the narrowest neighbours until so many are open; yields after each step how many are."""
    while len(taking := open_shards(client, stream)) != count:
        if len(taking) < count:
            split(client, stream, max(taking, key=width))
        else:
            merge(client, stream, *min(itertools.pairwise(taking), key=lambda pair: width(pair[0]) + width(pair[1])))
        yield len(open_shards(client, stream))
