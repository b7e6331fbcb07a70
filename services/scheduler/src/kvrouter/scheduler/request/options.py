"""Routing options, and their overrides in a request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy as np
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.request.remote_prefill import RemotePrefillOptions
from kvrouter.v1.common_pb2 import BusyThresholds, RoutingOverrides
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.scheduler_pb2 import SetBusyThresholdRequest
from numpy.typing import NDArray

DEFAULT_MODE = "forecast"

OF_POLICIES = ("overlap_score_weight", "router_temperature", "max_queued_requests")
"""Options of some modes only: each policy names its own."""

_THRESHOLDS = ("active_decode_blocks_threshold", "active_prefill_tokens_threshold")

_OVERRIDES_OF_POLICIES = ("overlap_score_weight", "router_temperature")

MAX_WEIGHT = 1e9
"""Maximum weight: far above any useful value, and low enough that costs stay exact to one block."""


@dataclass(frozen=True)
class Thresholds:
    """Load above which a rank is busy; None is off."""

    decode_blocks: float | None = None
    """Active share of its KV blocks, 0 to 1."""
    prefill_tokens: int | None = None
    """Prefill tokens, booked and not yet computed."""

    def over(self, below: Thresholds) -> Thresholds:
        """Returns these thresholds, with those of ``below`` where one is off."""
        return Thresholds(
            below.decode_blocks if self.decode_blocks is None else self.decode_blocks,
            below.prefill_tokens if self.prefill_tokens is None else self.prefill_tokens,
        )

    @cached_property
    def any_set(self) -> bool:
        """Returns whether at least one threshold is on."""
        return self.decode_blocks is not None or self.prefill_tokens is not None

    @classmethod
    def of(cls, message: BusyThresholds | RoutingOverrides) -> Thresholds:
        """Returns the thresholds in a message.

        Raises:
            BadRequest: the share of blocks is not in 0 to 1.
        """
        decode = message.active_decode_blocks_threshold if "active_decode_blocks_threshold" in message else None
        prefill = message.active_prefill_tokens_threshold if "active_prefill_tokens_threshold" in message else None
        if decode is not None and not 0 <= decode <= 1:
            raise BadRequest(
                f"expected active_decode_blocks_threshold from 0 to 1, received {decode:g}",
                field="active_decode_blocks_threshold",
                advice="Send a share of a rank's blocks, 0 to 1.",
            )
        return cls(decode, prefill)

    def to_message(self) -> BusyThresholds:
        """Returns the thresholds as a message."""
        return BusyThresholds(
            active_decode_blocks_threshold=self.decode_blocks, active_prefill_tokens_threshold=self.prefill_tokens
        )


@dataclass(frozen=True, slots=True)
class ThresholdUpdate:
    """A change of the thresholds of one model."""

    values: Thresholds
    """Thresholds to set; None leaves one as it is."""
    clear_decode_blocks: bool = False
    """Whether to remove the decode threshold."""
    clear_prefill_tokens: bool = False
    """Whether to remove the prefill threshold."""

    @classmethod
    def of(cls, request: SetBusyThresholdRequest) -> ThresholdUpdate:
        """Reads a request.

        Raises:
            BadRequest: a threshold is out of range or both set and cleared, or an unknown one is cleared.
        """
        values, cleared = Thresholds.of(request.thresholds), frozenset(request.cleared.paths)
        for name in sorted(cleared):
            if name not in _THRESHOLDS:
                raise BadRequest(
                    f"cleared names {name[:64]!r}, which is no threshold",
                    field="cleared",
                    advice=f"Name {' or '.join(_THRESHOLDS)}.",
                    known=_THRESHOLDS,
                )
            if name in request.thresholds:
                raise BadRequest(
                    f"{name} is both set and cleared", field=name, advice="Send the new value, or clear it, not both."
                )
        return cls(values, *(name in cleared for name in _THRESHOLDS))

    def __bool__(self) -> bool:
        return self.values.any_set or self.clear_decode_blocks or self.clear_prefill_tokens

    def apply(self, before: Thresholds) -> Thresholds:
        """Returns the thresholds after the update."""
        return self.values.over(
            Thresholds(
                None if self.clear_decode_blocks else before.decode_blocks,
                None if self.clear_prefill_tokens else before.prefill_tokens,
            )
        )


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What blocks below device memory are worth: in host memory, on disk and in shared storage."""

    weights: tuple[float, float, float] = (0.75, 0.25, 0.5)
    """Share of a block's computation that finding it there saves, 0 to 1, in modes without a forecast."""
    load_gb_per_second: tuple[float, float, float] = (20.0, 5.0, 10.0)
    """Bandwidth of loads in 10^9 bytes per second, until measured, of workers that register none."""


@dataclass(frozen=True)
class RoutingOptions:
    """Options by which a request is routed."""

    mode: str = DEFAULT_MODE
    """Name of the policy."""
    overlap_score_weight: float = 1.0
    """Weight of prefill blocks relative to decode blocks, 0 or more."""
    temperature: float = 0.0
    """Softmax temperature, 0 or more."""
    thresholds: Thresholds = Thresholds()
    """Load above which a rank is busy."""
    remote_prefill: RemotePrefillOptions = field(default_factory=RemotePrefillOptions)
    """When a prefill worker computes the prompt of a request in stage decode."""
    tiers: TierOptions = TierOptions()
    """What blocks below device memory are worth."""

    @cached_property
    def queues(self) -> bool:
        """Returns whether the policy queues requests without room."""
        return "max_queued_requests" in POLICIES[self.mode].options

    def load_ms_per_token(self, registered: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the time to load a token's KV cache in ms, until measured: a row for each lower tier.

        Args:
            registered: Bandwidth of the same rows and columns, 10^9 bytes per second; 0 for the configured one.
        """
        bandwidths = np.where(registered > 0, registered, np.array(self.tiers.load_gb_per_second)[:, None])
        return self.remote_prefill.transfer.bytes_per_token / (bandwidths * 1e6)

    @cached_property
    def queries_indexer(self) -> bool:
        """Returns whether the decision uses overlaps, from an Indexer."""
        policy = POLICIES[self.mode]
        is_weightless = "overlap_score_weight" in policy.options and not self.overlap_score_weight
        return policy.uses_overlap and not is_weightless


def ignored_overrides(overrides: RoutingOverrides, mode: str) -> tuple[str, ...]:
    """Returns the names of a request's overrides without effect in a mode."""
    effective = POLICIES[mode].options
    return tuple(name for name in _OVERRIDES_OF_POLICIES if name in overrides and name not in effective)


def overridden(options: RoutingOptions, overrides: RoutingOverrides) -> RoutingOptions:
    """Returns the options for one request: the defaults with its overrides.

    Raises:
        BadRequest: an override is out of range, or names an unknown mode.
    """
    mode = overrides.mode if "mode" in overrides else options.mode
    if mode not in POLICIES:
        raise BadRequest(
            f"unknown router mode {mode[:64]!r}",
            field="overrides.mode",
            advice=f"Use one of: {', '.join(POLICIES)}.",
            known=POLICIES,
        )
    weight, temperature = options.overlap_score_weight, options.temperature
    if "overlap_score_weight" in overrides:
        weight = _checked("overlap_score_weight", overrides.overlap_score_weight, lambda value: value <= MAX_WEIGHT)
    if "router_temperature" in overrides:
        temperature = _checked("router_temperature", overrides.router_temperature, math.isfinite)
    thresholds = Thresholds.of(overrides).over(options.thresholds)
    return replace(options, mode=mode, overlap_score_weight=weight, temperature=temperature, thresholds=thresholds)


def _checked(name: str, value: float, allows: Callable[[float], bool]) -> float:
    # The condition is negated, so that NaN is refused too.
    if not (value >= 0 and allows(value)):
        raise BadRequest(
            f"expected {name} of 0 or more, received {value:g}",
            field=f"overrides.{name}",
            advice="Send a finite number, 0 or more.",
        )
    return value


class Tenant(msgspec.Struct, frozen=True):
    """Whose request it is."""

    name: str = ""
    """Name; requests without one count as those of one tenant."""
    weight: float = 1.0
    """Its share, relative to others'."""
