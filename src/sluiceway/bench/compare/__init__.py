"""Ours beside its peers: the same work, in turns, in one run."""

from __future__ import annotations
