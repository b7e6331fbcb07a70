from dataclasses import dataclass, field

from kvrouter.mocker.engine.time_model import TimeModel


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one simulated engine (one rank) is like. Raises ValueError for values that no engine could run with."""

    num_blocks: int = 16384
    """KV blocks in the cache, at least 1. With 16 tokens a block the default holds 262,144 tokens."""
    block_size: int = 16
    """Tokens per KV block, at least 1. Must equal the component's block size."""
    max_batched_tokens: int = 8192
    """Tokens computed per step, prefill and decode together; at least `max_sequences`, so that all can decode."""
    max_sequences: int = 256
    """Requests that run at once, at least 1. The rest wait."""
    max_waiting: int = 65536
    """Requests that may wait, at least 1; one more is refused. Preempted requests always have a place."""
    max_model_tokens: int | None = None
    """Longest sequence (prompt and output), tokens, at least 2 and at most what the cache holds; None: just that.
    Output ends there with `length`."""
    prefix_caching: bool = True
    """Off: nothing is reused and no cache event is made."""
    speed: float = 1.0
    """Above 0. At 2 every step takes half the time that the time model says."""
    vocabulary_size: int = 32000
    """Output tokens are drawn from [0, vocabulary_size), 1 to 2^32."""
    hash_seed: int = 0
    """Seeds the engine hashes: engines of equal seed give equal blocks equal hashes, others do not. A u64."""
    time_model: TimeModel = field(default_factory=TimeModel)
    """Step times at speed 1."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_batched_tokens", "max_sequences", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"max_batched_tokens is {self.max_batched_tokens}, must be at least max_sequences, {self.max_sequences}"
            )
        if self.capacity_tokens < 2:
            raise ValueError("num_blocks * block_size is 1: the cache must hold a prompt token and an output token")
        if self.max_model_tokens is not None and not 2 <= self.max_model_tokens <= self.capacity_tokens:
            raise ValueError(
                f"max_model_tokens is {self.max_model_tokens}, must be 2 to {self.capacity_tokens} (the cache's size)"
            )
        if not 0 < self.speed < float("inf"):
            raise ValueError(f"speed is {self.speed}, must be above 0 and finite")
        if not 1 <= self.vocabulary_size <= 1 << 32:
            raise ValueError(f"vocabulary_size is {self.vocabulary_size}, must be 1 to 2^32")
        if not 0 <= self.hash_seed < 1 << 64:
            raise ValueError(f"hash_seed is {self.hash_seed}, must be a u64")

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def length_limit(self) -> int:
        """Longest sequence, prompt and output, in tokens."""
        return self.capacity_tokens if self.max_model_tokens is None else self.max_model_tokens
