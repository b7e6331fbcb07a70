"""The time of an engine step.

    prefill(n) = n2·n² + n1·n + n0          n = prompt tokens computed in the step, over all requests; 0 ms when n = 0
    decode(p)  = max(floor, p2·p² + p1·p + p0)   p = context tokens of the decoding sequences / KV capacity in tokens,
                                            at most 1; 0 ms when nothing decodes
    step       = prefill(n) + decode(p)     a sum, not a maximum: one step does both kinds of work

All terms are milliseconds at speed 1. p counts the context of each decoding sequence, so that shared blocks count once
per sequence, because attention reads every context. With many shared blocks p would exceed 1, but the curve is a fit up
to 1 and falls beyond.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeModel:
    """The coefficients. The defaults are those of the mock engine in Dynamo 1.6 (an H200-like worker)."""

    prefill_n2_ms: float = 4.209989e-07
    """ms per squared prompt token."""
    prefill_n1_ms: float = 1.518344e-02
    """ms per prompt token."""
    prefill_n0_ms: float = 16.50142
    """ms per step that computes any prompt token."""
    decode_p2_ms: float = -25.74
    """ms at a share of 1, squared term."""
    decode_p1_ms: float = 54.01
    """ms at a share of 1, linear term."""
    decode_p0_ms: float = 5.74
    """ms per step that decodes anything."""
    decode_floor_ms: float = 1.0
    """Minimum time of a decode, ms, so that no two tokens of a request have the same time."""

    def step_seconds(self, prefill_tokens: int, decode_tokens: int, capacity_tokens: int) -> float:
        """Returns the time of a step in seconds at speed 1.

        `prefill_tokens`: prompt tokens computed in the step. `decode_tokens`: sum of the context lengths of the
        decoding sequences, 0 if none decodes. `capacity_tokens`: capacity of the KV cache.
        """
        ms = 0.0
        if prefill_tokens:
            ms += (self.prefill_n2_ms * prefill_tokens + self.prefill_n1_ms) * prefill_tokens + self.prefill_n0_ms
        if decode_tokens:
            share = min(decode_tokens / capacity_tokens, 1.0)
            ms += max(self.decode_floor_ms, (self.decode_p2_ms * share + self.decode_p1_ms) * share + self.decode_p0_ms)
        return ms / 1e3
