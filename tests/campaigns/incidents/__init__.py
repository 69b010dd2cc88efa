"""Incidents that are staged for real, and what the server says of them."""

from __future__ import annotations
