"""Options of the Scheduler."""

from __future__ import annotations

from kvrouter.runtime.config.settings import RoutingSettings
from kvrouter.runtime.kv_transfer import KvTransfer
from kvrouter.scheduler.load.booked_load import Accounting
from kvrouter.scheduler.overlap.predictions import PredictionLimits
from kvrouter.scheduler.policies.catalogue import INSTALLED, POLICIES
from kvrouter.scheduler.queue.request_queue import MAX_QUEUED_REQUESTS
from kvrouter.scheduler.request.options import (
    DEFAULT_MODE,
    MAX_WEIGHT,
    OF_POLICIES,
    RoutingOptions,
    Thresholds,
    TierOptions,
)
from kvrouter.scheduler.request.remote_prefill import RemotePrefillOptions
from pydantic import AliasChoices, Field, field_validator, model_validator


class SchedulerSettings(RoutingSettings):
    """Options of ``kvrouter-scheduler``; each is a flag, an environment variable and a key of the file."""

    router_mode: str = Field(default=DEFAULT_MODE, description=f"Policy that chooses a rank: {', '.join(POLICIES)}.")
    overlap_score_weight: float = Field(
        default=1.0,
        ge=0,
        le=MAX_WEIGHT,
        validation_alias=AliasChoices("overlap_score_weight", "kv_overlap_score_weight"),
    )
    """Weight of prefill blocks relative to decode blocks in mode kv; with 0 that queries no Indexer."""
    router_temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Softmax temperature in mode kv; 0 takes the cheapest rank."""
    active_decode_blocks_threshold: float | None = Field(
        default=None, ge=0, le=1, validation_alias=AliasChoices("active_decode_blocks_threshold", "busy_threshold")
    )
    """Share of its KV blocks in use, 0 to 1, above which a rank is busy; none is off."""
    active_prefill_tokens_threshold: int | None = Field(default=None, ge=0)
    """Prompt tokens booked and not yet computed above which a rank is busy; none is off."""
    track_active_blocks: bool = Field(
        default=True, validation_alias=AliasChoices("track_active_blocks", "router_track_active_blocks")
    )
    """Whether blocks of requests in flight count as load."""
    assume_kv_reuse: bool = Field(
        default=True, validation_alias=AliasChoices("assume_kv_reuse", "router_assume_kv_reuse")
    )
    """Whether requests in flight share equal blocks; otherwise each request counts all of its blocks."""
    track_output_blocks: bool = True
    """Whether blocks of generated tokens count as load."""
    indexer_timeout_ms: int = Field(default=50, ge=1)
    """Longest wait for an Indexer before a request is routed on load alone, in milliseconds."""
    session_grace_seconds: float = Field(default=10.0, ge=0)
    """Time for which the bookings of a broken session are kept, in seconds."""
    replica_sync: bool = Field(default=False, validation_alias=AliasChoices("replica_sync", "router_replica_sync"))
    """Whether Schedulers replicate their bookings to each other over NATS."""
    replica_heartbeat_seconds: float = Field(default=1.0, gt=0)
    """Interval between heartbeats that Schedulers send each other to detect lost bookings, in seconds."""
    load_report_age_seconds: float = Field(default=10.0, gt=0)
    """Age above which a load report is ignored, in seconds. Workers repeat an unchanged one every 7 s at the latest."""
    conversations_kept: int = Field(default=65_536, ge=0)
    """Number of conversations whose rank is remembered, the most recent ones; 0 remembers none."""
    kv_events: bool = True
    """Whether overlaps come from the workers' events, and are predicted from routed requests only for workers
    without events; if not, for all."""
    router_ttl: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Time after a request for which its blocks are predicted to be resident, in seconds."""
    router_max_tree_size: int = Field(default=1 << 20, ge=1)
    """Most blocks that are predicted to be resident, summed over the ranks of a component."""
    router_prune_target_ratio: float = Field(default=0.99, ge=0, le=1)
    """Share of the most predicted blocks, 0 to 1, that is kept when there are more. Each block dropped takes 0.1 µs."""
    max_queued_requests: int = Field(default=MAX_QUEUED_REQUESTS, ge=0, le=8192)
    """Most requests of a component that wait for a rank with room in mode forecast; 0 queues none."""
    overload_lag_ms: float = Field(default=20.0, ge=0, allow_inf_nan=False)
    """Mean lateness of the event loop above which sharding is advised, in milliseconds; 0 is never."""
    remote_prefill_min_tokens: int = Field(default=512, ge=0)
    """Least prompt tokens that the decode worker lacks for a prefill worker to compute the prompt."""
    prefill_us_per_token: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Time in which a decode worker computes a prompt token, compared with the transfer, microseconds; learned from
    first tokens by default."""
    kv_bytes_per_token: int = Field(default=131_072, ge=0)
    """KV cache of a token that a prefill worker transfers, or a rank loads from a lower tier, in bytes."""
    kv_transfer_gb_per_second: float = Field(default=25.0, gt=0, allow_inf_nan=False)
    """Bandwidth of transfers from prefill to decode workers, in 10^9 bytes per second, until measured."""
    kv_transfer_latency_ms: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    """Time of a transfer besides that of its bytes, in milliseconds, until measured."""
    host_cache_hit_weight: float = Field(
        default=0.75, ge=0, le=1, validation_alias=AliasChoices("host_cache_hit_weight", "router_host_cache_hit_weight")
    )
    """Share of a block's computation that finding it in host memory saves, in modes other than forecast."""
    disk_cache_hit_weight: float = Field(
        default=0.25, ge=0, le=1, validation_alias=AliasChoices("disk_cache_hit_weight", "router_disk_cache_hit_weight")
    )
    """The same for a block on disk."""
    shared_cache_multiplier: float = Field(default=0.5, ge=0, le=1)
    """The same for a block in shared storage."""
    host_load_gb_per_second: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    """Bandwidth at which mode forecast expects blocks from host memory, in 10^9 bytes per second, until measured; for
    workers that register none."""
    disk_load_gb_per_second: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """The same for blocks on disk."""
    shared_load_gb_per_second: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """The same for blocks in shared storage."""
    decisions_kept: int = Field(default=1024, ge=1)
    """Number of past decisions that Explain can show."""

    log_formulas: bool = False
    """Whether the cost formula of every candidate of every decision is logged."""

    @field_validator("router_mode")
    @classmethod
    def _is_known(cls, mode: str) -> str:
        if mode not in POLICIES:
            if (cause := INSTALLED.refused.get(mode)) is not None:
                raise ValueError(f"the policy of this mode cannot be used: {cause}")
            raise ValueError(f"unknown mode: use one of {', '.join(POLICIES)}")
        return mode

    @model_validator(mode="after")
    def _needs_no_etcd_with_listed_workers(self) -> SchedulerSettings:
        if self.static_workers and self.kv_events and self.routing().queries_indexer:
            raise ValueError(
                f"--static-workers: mode {self.router_mode} queries an Indexer, which needs etcd;"
                " add --no-kv-events, or choose another --router-mode (round-robin, random, power-of-two, direct)"
            )
        if self.static_workers and self.replica_sync:
            raise ValueError("--static-workers: replica sync needs NATS; leave --replica-sync out")
        return self

    def routing(self) -> RoutingOptions:
        """Returns the default routing options of requests."""
        thresholds = Thresholds(self.active_decode_blocks_threshold, self.active_prefill_tokens_threshold)
        transfer = KvTransfer(self.kv_bytes_per_token, self.kv_transfer_gb_per_second, self.kv_transfer_latency_ms)
        prefill = RemotePrefillOptions(self.remote_prefill_min_tokens, self.prefill_us_per_token, transfer)
        tiers = TierOptions(
            (self.host_cache_hit_weight, self.disk_cache_hit_weight, self.shared_cache_multiplier),
            (self.host_load_gb_per_second, self.disk_load_gb_per_second, self.shared_load_gb_per_second),
        )
        weight, temperature = self.overlap_score_weight, self.router_temperature
        return RoutingOptions(self.router_mode, weight, temperature, thresholds, prefill, tiers)

    def prediction_limits(self) -> PredictionLimits:
        """Returns the limits of predicted blocks."""
        return PredictionLimits(self.router_ttl, self.router_max_tree_size, self.router_prune_target_ratio)

    def ignored_options(self) -> list[str]:
        """Returns the given flags without effect.

        These are options of other modes.
        """
        ignored = [name for name in OF_POLICIES if name not in POLICIES[self.router_mode].options]
        return [f"--{name.replace('_', '-')}" for name in ignored if name in self.model_fields_set]

    def accounting(self) -> Accounting:
        """Returns the rules for counting load."""
        return Accounting(self.track_active_blocks, self.assume_kv_reuse, self.track_output_blocks)
