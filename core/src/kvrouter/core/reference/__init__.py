"""The core in plain Python: what every operation means, written down as directly as dicts and sets allow.

It is the oracle of the randomized tests, and it runs where there is no Rust toolchain.
"""

from kvrouter.core.reference.hashing import local_hashes, sequence_hashes

__all__ = ["local_hashes", "sequence_hashes"]
