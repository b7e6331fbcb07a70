"""The core in plain Python: every operation in its simplest form, on dicts and sets.

Randomized tests compare the Rust core with it. It also runs on machines without a Rust toolchain.
"""

from kvrouter.core.reference.active_sequences import ActiveSequences
from kvrouter.core.reference.cache_recency import CacheRecency
from kvrouter.core.reference.calls import read_calls, read_responses, write_calls, write_responses
from kvrouter.core.reference.chunk_writer import ChunkWriter
from kvrouter.core.reference.event_batch import EventBatch
from kvrouter.core.reference.event_recorder import EventRecorder
from kvrouter.core.reference.grpc import read_messages
from kvrouter.core.reference.hashing import local_hashes, sequence_hashes
from kvrouter.core.reference.json_tokens import (
    find_json_value,
    json_flaw,
    split_json,
    tokens_from_json,
    tokens_to_json,
)
from kvrouter.core.reference.matches import read_matches
from kvrouter.core.reference.memory_budget import MemoryBudget
from kvrouter.core.reference.nats import read_nats_messages
from kvrouter.core.reference.observations import Observations
from kvrouter.core.reference.output_writer import OutputWriter
from kvrouter.core.reference.outputs import read_output
from kvrouter.core.reference.passed_stream import PassedStream, pass_pieces
from kvrouter.core.reference.predicted_index import PredictedIndex
from kvrouter.core.reference.prefix_index import PrefixIndex
from kvrouter.core.reference.speeds import LatencyCalibration, MeasuredFactor
from kvrouter.core.reference.token_writer import TokenWriter
from kvrouter.core.reference.vocabulary import first_token_outside

__all__ = [
    "ActiveSequences",
    "CacheRecency",
    "ChunkWriter",
    "EventBatch",
    "EventRecorder",
    "LatencyCalibration",
    "MeasuredFactor",
    "MemoryBudget",
    "Observations",
    "OutputWriter",
    "PassedStream",
    "PredictedIndex",
    "PrefixIndex",
    "TokenWriter",
    "find_json_value",
    "first_token_outside",
    "json_flaw",
    "local_hashes",
    "pass_pieces",
    "read_calls",
    "read_matches",
    "read_messages",
    "read_nats_messages",
    "read_output",
    "read_responses",
    "sequence_hashes",
    "split_json",
    "tokens_from_json",
    "tokens_to_json",
    "write_calls",
    "write_responses",
]
