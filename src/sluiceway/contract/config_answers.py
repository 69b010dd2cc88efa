"""The configuration and the backends, as the server answers them."""

from __future__ import annotations

from typing import Annotated, TypedDict

from sluiceway.contract.fields import Answer, Duration, about


class Reloaded(Answer, frozen=True, kw_only=True):
    """The keys of the configuration that have changed."""

    changed: Annotated[list[str], about("The keys of the configuration that are different now.")] = []


class BackendInfo(TypedDict, total=False):
    """A storage backend. One that is not configured, and holds partitions all the same, has a `null` for each of its settings."""

    backend: Annotated[str, about("Its name.")]
    kind: Annotated[str | None, about("`sqlite`, `postgres` or `memory`; null: it is not configured.")]
    partition_affinity: Annotated[float | None, about("Its weight when partitions are placed; null: it is not configured.")]
    write_timeout: Annotated[Duration | None, about("Longest commit; the outcome of a longer one is unknown. Null: it is not configured.")]
    partitions: Annotated[int, about("Number of partitions that it holds.")]
    problem: Annotated[str | None, about("Why it does not serve; null: it does.")]


class BackendPage(Answer, frozen=True, kw_only=True):
    """All backends, by name."""

    items: Annotated[list[BackendInfo], about("The backends.")]
