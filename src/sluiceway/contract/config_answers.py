"""The configuration and the backends, as the server answers them."""

from __future__ import annotations

from typing import Annotated, TypedDict

from sluiceway.contract.fields import Answer, Duration, about


class Reloaded(Answer, frozen=True, kw_only=True):
    """The keys of the configuration that have changed."""

    changed: Annotated[list[str], about("Names of the changed settings.")] = []


class BackendInfo(TypedDict, total=False):
    """A storage backend. One that is not configured, and holds partitions all the same, has a `null` for each of its settings."""

    backend: Annotated[str, about("Its name.")]
    kind: Annotated[str | None, about("`sqlite`, `postgres`, `s3`, `gcs`, `azure` or `memory`; null: not configured.")]
    partition_affinity: Annotated[float | None, about("Weight in the placement of partitions; null: not configured.")]
    write_timeout: Annotated[
        Duration | None, about("Maximum duration of a commit; a longer one has an unknown outcome. Null: not configured.")
    ]
    partitions: Annotated[int, about("Number of its partitions.")]
    problem: Annotated[str | None, about("Why it is not served; null: it is.")]


class BackendPage(Answer, frozen=True, kw_only=True):
    """All backends, by name."""

    items: Annotated[list[BackendInfo], about("The backends.")]
