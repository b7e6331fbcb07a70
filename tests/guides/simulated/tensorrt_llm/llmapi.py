"""Configuration of the simulated engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class KvCacheConfig:
    """Options of the cache."""

    enable_block_reuse: bool = True
    tokens_per_block: int = 32
    event_buffer_max_size: int = 0
