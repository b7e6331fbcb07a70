"""Reads chosen samples of an engine's Prometheus metrics. One malformed line does not cost the others."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


MOST_COUNTED = (1 << 31) - 1
"""Most requests, and tokens, that an engine can credibly report."""


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One value."""

    name: str
    labels: Mapping[str, str]
    value: float


def read_samples(page: bytes, names: Collection[str]) -> tuple[list[EngineSample], int]:
    """Returns the samples with these names, and how many of them were left out as malformed, not finite or negative."""
    samples = []
    unusable = 0
    for line in page.decode("utf-8", "replace").splitlines():
        name = _NAME.match(line)
        if name is None or name[0] not in names:
            continue
        try:
            parsed = [sample for family in text_string_to_metric_families(line) for sample in family.samples]
        except (ValueError, IndexError, KeyError):
            parsed = []
        usable = [
            EngineSample(each.name, each.labels, each.value)
            for each in parsed
            if math.isfinite(each.value) and each.value >= 0
        ]
        unusable += not usable
        samples.extend(usable)
    return samples, unusable


def read_values(
    page: bytes, names: Mapping[str, float], label: str, ranks: Collection[int]
) -> tuple[dict[int, dict[str, float]], int]:
    """Returns the values by name of each rank that has all of them, and how many values were unusable.

    Args:
        page: The metrics.
        names: Names of the samples, each with the most that its value may be.
        label: Label with the rank.
        ranks: The ranks of the engine.
    """
    samples, unusable = read_samples(page, names)
    values: dict[int, dict[str, float]] = {}
    for sample in samples:
        rank = _rank_of(sample, label, ranks)
        if rank is None or sample.value > names[sample.name]:
            unusable += 1
        else:
            values.setdefault(rank, {})[sample.name] = sample.value
    return {rank: each for rank, each in values.items() if len(each) == len(names)}, unusable


def _rank_of(sample: EngineSample, label: str, ranks: Collection[int]) -> int | None:
    """Returns the rank that a sample is of, by one of its labels; None for a rank that the engine does not have.

    A sample without the label is of the engine's only rank.
    """
    text = sample.labels.get(label, "")
    if not text.isdecimal():
        return min(ranks) if len(ranks) == 1 else None
    rank = int(text)
    return rank if rank in ranks else None
