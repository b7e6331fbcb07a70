"""Reads chosen samples of an engine's Prometheus metrics. One malformed line does not cost the others."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


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


def rank_of(sample: EngineSample, label: str, ranks: Collection[int]) -> int | None:
    """Returns the rank that a sample is of, by one of its labels; None for a rank that the engine does not have.

    A sample without the label is of the engine's only rank.
    """
    text = sample.labels.get(label, "")
    if not text.isdecimal():
        return min(ranks) if len(ranks) == 1 else None
    rank = int(text)
    return rank if rank in ranks else None
