"""How an attempt was routed, within this process."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.v1.common_pb2 import Component, KvSource, LowerTiers, Rank
from kvrouter.v1.frontend_pb2 import RoutedOn, RoutingInfo
from msgspec import Struct
from msgspec.structs import asdict


class Routed(Struct, eq=False):
    """The fields of the contract's ``RoutingInfo``. To make and read a message takes many times as long."""

    request_id: str
    rank: Rank
    attempt: int = 0
    predicted_overlap_blocks: int = 0
    prompt_blocks: int = 0
    decision_id: int = 0
    load_only: bool = False
    routed_on: RoutedOn = RoutedOn.ROUTED_ON_UNSPECIFIED
    router_us: int = 0
    queued_us: int = 0
    mode: str = ""
    model_choice: str = ""
    component: Component | None = None
    predicted_lower_blocks: LowerTiers | None = None
    kv_source: KvSource | None = None
    ignored_overrides: Sequence[str] = ()
    earlier_ranks: Sequence[Rank] = ()
    migrations: int = 0
    inexact_continuation: bool = False
    prefill_reason: str = ""
    prefill_us: int = 0
    prefill_rank: Rank | None = None

    def to_message(self) -> RoutingInfo:
        """Returns the message."""
        return RoutingInfo(**asdict(self))
