"""The bars of the request path, and whether samples meet them."""

from __future__ import annotations

from dataclasses import dataclass

from samples import Samples

ONE_PROCESS, SPLIT, SPLIT_IN_TWO, PEER = "one process", "split", "split with 2 Frontend processes", "Dynamo"
"""Names of the systems whose engines are workers."""
FORWARDED, TOKENIZED, SGLANG, VLLM = "forwarded", "forwarded, tokenizer", "SGLang's router", "vLLM's router"
PICKED, PICKED_TOKENIZED, ENVOY = "picker", "picker, tokenizer", "Envoy, round-robin"
"""Names of the systems whose engines have OpenAI APIs."""
LONG_PROMPTS = ("128k ids", "500 kB of text", "500 kB chat", "500 kB, Messages", "500 kB, Responses")
BESIDE = "1k, 50/s, beside 128k, 1/s"
"""Rows of the part ``long``."""


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
    to: str = ""
    """System of whose value in the same run the limit is a multiple; empty for none."""
    unit: str = "µs"

    def measured(self, samples: Samples) -> float | None:
        """Returns what the limit applies to; None if it was not measured."""
        if self.to:
            return samples.ratio(self.row, self.system, self.to, self.value)
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
        return f"{value:.2f} times {self.to}" if self.to else f"{value:,.3g} {self.unit}"


def _relative(work: str, row: str, value: str, limits: dict[str, float]) -> tuple[Bar, ...]:
    return tuple(Bar(work, row, system, value, limit, to=PEER) for system, limit in limits.items())


BARS: tuple[Bar, ...] = (
    *_relative("1k in, 1 out, 16 at once: CPU", "1k", "cpu_us", {ONE_PROCESS: 1.0, SPLIT: 1.6}),
    *_relative("8k in, 1 out, 16 at once: CPU", "8k", "cpu_us", {ONE_PROCESS: 1.0, SPLIT: 1.5}),
    *_relative("1k in, 128 out, 64 at once: CPU", "stream", "cpu_us", {ONE_PROCESS: 0.75, SPLIT: 0.95}),
    *(Bar("a streamed token, 64 at once: CPU", "token", system, "cpu_us", 12) for system in (ONE_PROCESS, SPLIT)),
    *_relative("a streamed token, 64 at once: CPU", "token", "cpu_us", {ONE_PROCESS: 1.1, SPLIT: 1.1}),
    Bar("engine's side, a token, 64 at once: CPU of the SDK", "engine", "SDK", "cpu_us", 8),
    *_relative(
        "128k in, 1 out, 1 at once: CPU", "128k, 1 at once, 4 workers", "cpu_us", {ONE_PROCESS: 0.8, SPLIT: 1.0}
    ),
    *_relative("128k in, 256 at once: CPU", "128k, 256 at once, 4 workers", "cpu_us", {ONE_PROCESS: 1.0, SPLIT: 1.3}),
    *_relative("128k in: CPU of the engines", "128k, 1 at once, 4 workers", "engine_cpu_us", {ONE_PROCESS: 1.0}),
    *(
        Bar(f"{row}: longest callback, CPU", row, system, "longest_ms", 5, unit="ms")
        for row in LONG_PROMPTS
        for system in (ONE_PROCESS, SPLIT)
    ),
    *(
        Bar("1k, 50/s: p99 that a prompt of 128k a second adds", BESIDE, system, "added_p99_ms", 20, unit="ms")
        for system in (ONE_PROCESS, SPLIT)
    ),
    *_relative("1k in, 1 out, alone: p50", "alone-1k", "p50_us", {ONE_PROCESS: 1.4, SPLIT: 2.3}),
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
    *(
        Bar(f"forwarded {row}, 16 at once: CPU", row, FORWARDED, "cpu_us", limit, to=other)
        for row in ("text of 1k", "chat of 1k", "text of 8k", "chat of 8k")
        for other, limit in ((SGLANG, 2.5), (VLLM, 1.25))
    ),
    Bar("forwarded, a streamed token, 64 at once: CPU", "token of a chat", FORWARDED, "cpu_us", 1.25, to=VLLM),
    Bar("picked chat of 1k: the picker's CPU", "chat of 1k", PICKED, "cpu_us picker", 1e6 / 1500),
    Bar("picked chat of 8k: the picker's CPU", "chat of 8k", PICKED, "cpu_us picker", 1e6 / 600),
    Bar(
        "picked chat of 8k, 7k of it shared, tokenizer: the picker's CPU",
        "chat of 8k, 7k shared",
        PICKED_TOKENIZED,
        "cpu_us picker",
        1e6 / 400,
    ),
    Bar("picked, a streamed token, 64 at once: the picker's CPU", "token of a chat", PICKED, "cpu_us picker", 5),
)
