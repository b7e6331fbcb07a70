"""The bars of the request path, and whether samples meet them."""

from __future__ import annotations

from dataclasses import dataclass

from samples import Samples

ONE_PROCESS, SPLIT, PEER = "one process", "split", "Dynamo"
"""Names of the systems."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for one value of one row and system."""

    work: str
    """The work, for people."""
    row: str
    system: str
    value: str
    """Name of the value in the row's samples."""
    limit: float
    relative: bool = False
    """Whether the limit is a multiple of Dynamo's value in the same run."""
    unit: str = "µs"

    def measured(self, samples: Samples) -> float | None:
        """Returns what the limit applies to; None if it was not measured."""
        if self.relative:
            return samples.ratio(self.row, self.system, PEER, self.value)
        return samples.median(self.row, self.system, self.value)

    def verdict(self, samples: Samples) -> str:
        """Returns ``met``, ``missed`` or ``not measured``."""
        measured = self.measured(samples)
        if measured is None:
            return "not measured"
        return "met" if measured <= self.limit else "missed"

    def show(self, value: float | None) -> str:
        """Returns a value in the bar's unit."""
        if value is None:
            return ""
        return f"{value:.2f} times Dynamo" if self.relative else f"{value:,.3g} {self.unit}"


def _relative(work: str, row: str, value: str, limits: dict[str, float]) -> tuple[Bar, ...]:
    return tuple(Bar(work, row, system, value, limit, relative=True) for system, limit in limits.items())


BARS: tuple[Bar, ...] = (
    *_relative("1k in, 1 out, 16 at once: CPU", "1k", "cpu_us", {ONE_PROCESS: 1.25, SPLIT: 2.2}),
    *_relative("8k in, 1 out, 16 at once: CPU", "8k", "cpu_us", {ONE_PROCESS: 1.25, SPLIT: 2.0}),
    *_relative("1k in, 128 out, 64 at once: CPU", "stream", "cpu_us", {ONE_PROCESS: 1.15, SPLIT: 1.6}),
    *(Bar("a streamed token, 64 at once: CPU", "token", system, "cpu_us", 12) for system in (ONE_PROCESS, SPLIT)),
    *_relative("a streamed token, 64 at once: CPU", "token", "cpu_us", {ONE_PROCESS: 1.1, SPLIT: 1.1}),
    Bar("engine's side, a token, 64 at once: CPU of the SDK", "engine", "SDK", "cpu_us", 8),
    *_relative("1k in, 1 out, alone: p50", "alone-1k", "p50_us", {ONE_PROCESS: 1.9, SPLIT: 3.1}),
    Bar("1k words of text, 768 of them shared, 16 at once: CPU", "text-1k", ONE_PROCESS, "cpu_us", 1000),
    *_relative("1k words of text, nothing shared: CPU", "text-1k, nothing shared", "cpu_us", {ONE_PROCESS: 1.1}),
    Bar("decision, 16 candidates, 250 blocks", "decision", "kv", "p50_us", 25),
    Bar("decision, 16 candidates, 250 blocks", "decision", "forecast", "p50_us", 50),
    Bar("overlap query, 750 hashes, 16 workers, 16 at once: CPU", "overlap", "Indexer", "cpu_us", 100),
    *(
        Bar(
            "memory over a million requests, or those of its time: growth",
            "memory",
            system,
            "growth_percent",
            2,
            unit="%",
        )
        for system in (ONE_PROCESS, SPLIT)
    ),
)
