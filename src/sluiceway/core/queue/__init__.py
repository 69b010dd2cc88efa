"""A logical queue: which partition takes a request, and which ready items a lease gets."""

from __future__ import annotations
