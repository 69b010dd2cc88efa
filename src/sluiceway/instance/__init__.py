"""One instance: its service, configuration, health, events and API keys."""

from __future__ import annotations
