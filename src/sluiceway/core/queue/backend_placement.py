"""Placement of a queue's partitions on backends."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

from sluiceway.kernel.errors import invalid
from sluiceway.model.backends import BackendSettings, MemoryBackend


def place(requested: int, affinities: Mapping[str, float], has: Mapping[str, int] = MappingProxyType({})) -> dict[str, int]:
    """Return how many of `requested` partitions (at least 1) go to each backend, in proportion to its affinity.

    Fractions go to the largest remainders; ties to the backend that `has` more already, to avoid needless moves, then to the first by name.
    An affinity of 0 takes none. Deterministic across processes and orders of the backends. Raises `invalid_request` if no affinity is above
    0.
    """
    weights = {name: Fraction(affinities[name]) for name in sorted(affinities)}
    total = sum(weights.values())
    if not total:
        raise invalid("partition_affinity", "at least one backend must have a partition_affinity above 0")
    shares = {name: max(1, requested) * weight / total for name, weight in weights.items()}
    counts = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (counts[name] - shares[name], -has.get(name, 0)))
    for name in by_remainder[: max(1, requested) - sum(counts.values())]:
        counts[name] += 1
    return counts


def interleave(counts: Mapping[str, int]) -> list[str]:
    """The backend of each partition, by number. Each backend's partitions are spread evenly, so that any run of numbers has a fair share of
    each."""
    places = [(Fraction(2 * nth + 1, count), name) for name, count in counts.items() for nth in range(count)]
    return [name for _, name in sorted(places)]


def check_backends(backends: Mapping[str, BackendSettings]) -> None:
    """Raise `invalid_request` for backends that cannot be configured together."""
    place(1, {name: settings.partition_affinity for name, settings in backends.items()})
    if len({isinstance(settings, MemoryBackend) for settings in backends.values()}) > 1:
        raise invalid("backends", "a memory backend cannot be combined with others: a queue would lose part of its items at each restart")
