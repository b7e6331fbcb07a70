"""Measurements: samples of each row and system, their medians, and ratios of samples that were taken in one round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run of a row with a system measured."""

    row: str
    system: str
    round: int
    values: dict[str, float]


@dataclass
class Samples:
    """All samples of a benchmark, in the order in which they were taken."""

    taken: list[Sample] = field(default_factory=list)

    def add(self, row: str, system: str, round: int, values: dict[str, float]) -> None:  # noqa: A002 - the word for it
        self.taken.append(Sample(row, system, round, values))

    def of(self, row: str, system: str, name: str) -> list[float]:
        """Returns a value by round; empty if it was not measured."""
        return [
            sample.values[name]
            for sample in self.taken
            if (sample.row, sample.system) == (row, system) and name in sample.values
        ]

    def median(self, row: str, system: str, name: str) -> float | None:
        """Returns the median of a value over the rounds; None if it was not measured."""
        values = self.of(row, system, name)
        return statistics.median(values) if values else None

    def ratio(self, row: str, system: str, other: str, name: str) -> float | None:
        """Returns the median ratio to another system, round by round: load beside the benchmark affects both alike."""
        pairs = zip(self.of(row, system, name), self.of(row, other, name), strict=False)
        ratios = [one / two for one, two in pairs if two > 0]
        return statistics.median(ratios) if ratios else None

    def rows(self) -> list[tuple[str, str]]:
        """Returns every row and system that was measured, in order."""
        return list(dict.fromkeys((sample.row, sample.system) for sample in self.taken))

    def names(self, row: str, system: str) -> list[str]:
        """Returns the names of a row's values."""
        found = (sample for sample in self.taken if (sample.row, sample.system) == (row, system))
        return list(dict.fromkeys(name for sample in found for name in sample.values))

    def encode(self) -> list[dict[str, Any]]:
        """Returns the samples for JSON."""
        return [
            {"row": each.row, "system": each.system, "round": each.round, "values": each.values} for each in self.taken
        ]

    @classmethod
    def decode(cls, encoded: Iterable[dict[str, Any]]) -> Samples:
        """Returns samples from JSON."""
        return cls([Sample(each["row"], each["system"], each["round"], each["values"]) for each in encoded])
