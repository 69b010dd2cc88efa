"""What a campaign has found, and the figures by the way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence


class Report:
    """Of one scenario. Says at once what it is told; `wrong` is what makes the campaign fail."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wrong: list[str] = []
        self.figures: list[str] = []
        """For the line at the end."""
        self.missed: list[str] = []
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def say(self, line: str) -> None:
        print(f"{self.name} {self.seconds:6.1f} s  {line}", flush=True)

    def fail(self, line: str) -> None:
        self.wrong.append(line)
        self.say(f"WRONG: {line}")

    def figure(self, text: str) -> None:
        self.figures.append(text)
        self.say(text)

    def within(self, what: str, seconds: float, limit: float) -> None:
        """Fails if it took longer."""
        if seconds > limit:
            self.fail(f"{what} took {seconds:.1f} s, more than {limit:.0f} s")

    def aim(self, what: str, value: float, aim: float) -> None:
        """Notes it if the value is above what was aimed at."""
        if value > aim:
            self.missed.append(f"{what} {value:.3g}, aim {aim:g}")


def most_and_median(seconds: Sequence[float]) -> str:
    return f"{max(seconds):.1f} s at most, {statistics.median(seconds):.1f} s in the median"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]
