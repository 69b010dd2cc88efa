"""`sluiceway cluster`: from a standalone server to a cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sluiceway.cli.common import FILE, Output, counted, printing
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from sluiceway.instance.adoption import Adopted, Copied


@click.group()
def cluster() -> None:
    """Bring the data of a standalone server into a cluster."""


@cluster.command("adopt")
@click.argument("data", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--config", type=FILE, help="Configuration file of the cluster's instances, with [cluster] meta and the backends.")
@click.option("--cluster-meta", metavar="URL", help="The meta store of the cluster, as in `serve`.")
@printing
def adopt(output: Output, data: Path, config: Path | None, cluster_meta: str | None) -> None:
    """Bring everything in the data folder DIR of a standalone server into a cluster.

    That is: queues with their items, leases and idempotency keys; API keys, the audit trail, the history. Ids and leases stay valid.

    Stop the server first; the cluster may be running. If the command is interrupted, run it again. After it, no server starts on DIR alone.
    """
    adopted = _adopt(data, config, cluster_meta, _progress(output))
    output.print(adopted, _text(adopted))


def _adopt(data: Path, config: Path | None, cluster_meta: str | None, tell: Callable[[Copied], None]) -> Adopted:
    import asyncio

    from sluiceway.adapters.lock import DirectoryInUseError
    from sluiceway.adapters.meta.opening import open_meta_store
    from sluiceway.instance.adoption import adopt_directory
    from sluiceway.instance.configuration import load
    from sluiceway.ports.meta_store import ConflictError, MetaUnknownError
    from sluiceway.ports.partition_store import DamagedError, FencedError, StoreUnavailableError

    configuration = load(config, flags={} if cluster_meta is None else {"cluster.meta": cluster_meta}).configuration
    url = configuration.cluster.meta
    if not url:
        raise click.UsageError("pass the configuration of the cluster: --config FILE with [cluster] meta, or --cluster-meta URL")
    try:
        return asyncio.run(adopt_directory(data, lambda: open_meta_store(url), url, configuration.backends, tell))
    except DirectoryInUseError as error:
        raise SluicewayError("unavailable", str(error), "data") from error
    except DamagedError as error:
        raise SluicewayError("partition_damaged", str(error), "data") from error
    except (StoreUnavailableError, MetaUnknownError, ConflictError, FencedError) as error:
        raise SluicewayError("unavailable", f"{error}; the adoption is not complete: run the same command again", "data") from error


def _progress(output: Output) -> Callable[[Copied], None]:
    def tell(copied: Copied) -> None:
        # One line that is overwritten.
        sys.stderr.write(f"\r{copied.partitions:,} of {counted(copied.of, 'partition')}, {_megabytes(copied.nbytes)}\x1b[K")
        if copied.partitions == copied.of:
            sys.stderr.write("\n")
        sys.stderr.flush()

    return tell if output.progress else lambda _: None


def _text(adopted: Adopted) -> str:
    what = f"{counted(adopted.queues, 'queue')}, {counted(adopted.partitions, 'partition')} and {counted(adopted.api_keys, 'API key')}"
    if adopted.was_done:
        return f"Adopted before: {what}"
    return f"Adopted {what}; copied {counted(adopted.copied_partitions, 'partition')}, {_megabytes(adopted.copied_bytes)}"


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
