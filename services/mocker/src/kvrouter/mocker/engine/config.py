from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.mocker.engine.time_model import TimeModel


@dataclass(frozen=True, slots=True)
class TierConfig:
    """A tier of the KV cache below device memory. Raises ValueError if no tier could be like this."""

    num_blocks: int = 0
    """KV blocks that the engine stores there, 0 or more; 0 for no such tier."""
    gb_per_second: float = 20.0
    """Bandwidth at which blocks are loaded, in 10^9 bytes per second, above 0."""
    latency_ms: float = 0.1
    """Time of a load besides that of its bytes, ms, 0 or more."""

    def __post_init__(self) -> None:
        if self.num_blocks < 0:
            raise ValueError(f"num_blocks of a tier is {self.num_blocks}: expected 0 or more")
        if not 0 < self.gb_per_second < float("inf"):
            raise ValueError(f"gb_per_second is {self.gb_per_second}: expected above 0 and finite")
        if not 0 <= self.latency_ms < float("inf"):
            raise ValueError(f"latency_ms is {self.latency_ms}: expected 0 or more and finite")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of one simulated engine, that is one rank. Raises ValueError if no engine could run with it."""

    num_blocks: int = 16384
    """KV blocks of the cache, at least 1. With 16 tokens per block, the default is 262,144 tokens."""
    block_size: int = 16
    """Tokens per KV block, at least 1. Must equal the component's."""
    max_batched_tokens: int = 8192
    """Tokens computed per step, prefill and decode together; at least `max_sequences`, so that all can decode."""
    max_sequences: int = 256
    """Maximum number of running requests, at least 1; further ones wait."""
    max_waiting: int = 65536
    """Maximum number of waiting requests, at least 1; further ones are refused. Preempted requests may always wait."""
    max_model_tokens: int | None = None
    """Maximum length of a sequence, prompt and output, in tokens: at least 2, at most the cache's size, which is the
    default. The output ends there with `length`."""
    prefix_caching: bool = True
    """Whether prefixes are reused and cache events reported."""
    speed: float = 1.0
    """Speed relative to the time model, above 0. At 2, every step takes half the time."""
    vocabulary_size: int = 32000
    """Output tokens are drawn from 0 up to below this number, 1 to 2^32."""
    mean_output_tokens: float = 0.0
    """Mean length of outputs that end by themselves, with `stop`; 0 if none does."""
    hash_seed: int = 0
    """Seed of the engine hashes, u64. Only engines with equal seeds give equal blocks equal hashes."""
    time_model: TimeModel = field(default_factory=TimeModel)
    """Step times at speed 1."""
    host: TierConfig = TierConfig()
    """Host memory, to which computed blocks are copied."""
    shared: TierConfig = TierConfig()
    """The engine's part of a storage that several engines read. They find each other's blocks if their hash seeds are
    equal."""
    kv_bytes_per_token: int = 131_072
    """KV cache of a token that is loaded from a tier, in bytes, 0 or more."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_batched_tokens", "max_sequences", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least 1")
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"max_batched_tokens is {self.max_batched_tokens}: expected at least max_sequences={self.max_sequences}"
            )
        if self.capacity_tokens < 2:
            raise ValueError("num_blocks * block_size is 1: the cache must have room for a prompt and an output token")
        if self.max_model_tokens is not None and not 2 <= self.max_model_tokens <= self.capacity_tokens:
            raise ValueError(
                f"max_model_tokens is {self.max_model_tokens}: expected 2 to {self.capacity_tokens}, the cache's size"
            )
        if not 0 < self.speed < float("inf"):
            raise ValueError(f"speed is {self.speed}: expected above 0 and finite")
        if not 0 <= self.mean_output_tokens < float("inf"):
            raise ValueError(f"mean_output_tokens is {self.mean_output_tokens}: expected 0 or more and finite")
        if not 1 <= self.vocabulary_size <= 1 << 32:
            raise ValueError(f"vocabulary_size is {self.vocabulary_size}: expected 1 to 2^32")
        if not 0 <= self.hash_seed < 1 << 64:
            raise ValueError(f"hash_seed is {self.hash_seed}: expected a u64")
        if self.kv_bytes_per_token < 0:
            raise ValueError(f"kv_bytes_per_token is {self.kv_bytes_per_token}: expected 0 or more")

    @property
    def capacity_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        return self.num_blocks * self.block_size

    def block_load_seconds(self, tier: TierConfig) -> float:
        """Returns the time to load a block from a tier, besides the latency of a load, in seconds."""
        return self.block_size * self.kv_bytes_per_token / (tier.gb_per_second * 1e9)

    @property
    def length_limit(self) -> int:
        """Maximum length of a sequence, prompt and output, in tokens."""
        return self.capacity_tokens if self.max_model_tokens is None else self.max_model_tokens
