"""Campaigns of random and damaged input, from which the tests take some hundreds."""

from __future__ import annotations
