"""The interface of the core, which the Rust core and the Python reference both implement.

Hashes are passed packed: ``bytes`` of little-endian u64, or any contiguous buffer of bytes or of unsigned 64-bit
integers. Their functions raise TypeError for anything else. Ranks are pairs ``(worker_id, dp_rank)``.
"""

from kvrouter.core.interface.cache_recency import CachedRank, CacheRecency
from kvrouter.core.interface.calls import Call, Responses, call_of
from kvrouter.core.interface.event_recorder import (
    MAX_BATCH_BYTES,
    BatchHead,
    BlockNote,
    EventRecorder,
    EventsGone,
    InvalidEvent,
    PublisherError,
    RecorderCounts,
    UnknownParent,
)
from kvrouter.core.interface.events import MAX_EVENT_BLOCKS, ApplySummary, EventBatch, RefusedBatch
from kvrouter.core.interface.forecast import ForecastChoice, ForecastModel
from kvrouter.core.interface.load import ActiveSequences, LoadColumns
from kvrouter.core.interface.matches import Matches
from kvrouter.core.interface.names import NotATokenId, Rank, RankInfo, Scope, TokenBuffer
from kvrouter.core.interface.nats import NatsMessage
from kvrouter.core.interface.prefix_index import IndexStats, InvalidDump, MemoryBudget, PredictedIndex, PrefixIndex
from kvrouter.core.interface.speeds import LatencyCalibration, MeasuredFactor, Speed

__all__ = [
    "MAX_BATCH_BYTES",
    "MAX_EVENT_BLOCKS",
    "ActiveSequences",
    "ApplySummary",
    "BatchHead",
    "BlockNote",
    "CacheRecency",
    "CachedRank",
    "Call",
    "EventBatch",
    "EventRecorder",
    "EventsGone",
    "ForecastChoice",
    "ForecastModel",
    "IndexStats",
    "InvalidDump",
    "InvalidEvent",
    "LatencyCalibration",
    "LoadColumns",
    "Matches",
    "MeasuredFactor",
    "MemoryBudget",
    "NatsMessage",
    "NotATokenId",
    "PredictedIndex",
    "PrefixIndex",
    "PublisherError",
    "Rank",
    "RankInfo",
    "RecorderCounts",
    "RefusedBatch",
    "Responses",
    "Scope",
    "Speed",
    "TokenBuffer",
    "UnknownParent",
    "call_of",
]
