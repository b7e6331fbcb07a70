"""The time of a transfer of KV blocks from a prefill to a decode worker.

    time = latency + tokens * bytes per token / bandwidth

The defaults are those of a model with 8 billion parameters (Llama 3: 32 layers, 8 KV heads of 128 values of 2 bytes,
keys and values) over a link of 200 Gbit/s.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """A link between workers."""

    bytes_per_token: int = 131_072
    """KV cache of one token over all layers, bytes."""
    gigabytes_per_second: float = 25.0
    """Bandwidth, 10^9 bytes per second."""
    latency_ms: float = 5.0
    """Time of a transfer besides that of its bytes, ms."""

    @property
    def ms_per_token(self) -> float:
        """Time for the blocks of one token, ms."""
        return self.bytes_per_token / self.gigabytes_per_second / 1e6

    def ms(self, tokens: int) -> float:
        """Returns the time in ms for the blocks of a number of tokens; 0 for none."""
        return self.latency_ms + tokens * self.ms_per_token if tokens else 0.0
