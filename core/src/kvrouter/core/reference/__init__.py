"""The core in plain Python: what every operation means, written down as directly as dicts and sets allow.

It is the oracle of the randomized tests, and it runs where there is no Rust toolchain.
"""

from kvrouter.core.reference.active_sequences import ActiveSequences
from kvrouter.core.reference.event_batch import EventBatch
from kvrouter.core.reference.hashing import local_hashes, sequence_hashes
from kvrouter.core.reference.memory_budget import MemoryBudget
from kvrouter.core.reference.predicted_index import PredictedIndex
from kvrouter.core.reference.prefix_index import PrefixIndex

__all__ = [
    "ActiveSequences",
    "EventBatch",
    "MemoryBudget",
    "PredictedIndex",
    "PrefixIndex",
    "local_hashes",
    "sequence_hashes",
]
