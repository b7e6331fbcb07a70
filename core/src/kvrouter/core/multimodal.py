"""The rule by which the id of multimodal content becomes the hash in ``MultimodalHash``."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

_SEED = 1337
_U64 = (1 << 64) - 1


def multimodal_hash(content: int | str | bytes) -> int:
    """Returns the 64-bit hash of multimodal content, given its id.

    A number is the hash already. A string is hashed as UTF-8, and bytes as they are: XXH3-64 with seed 1337. So clients
    and engines that name the same content by the same id have the same hash. ``hash_vectors.json`` has examples.

    Raises:
        TypeError: the id is neither a number, a string nor bytes.
        OverflowError: the number does not fit into 64 bits.
    """
    if isinstance(content, str | bytes):
        return xxh3_64_intdigest(content.encode() if isinstance(content, str) else content, _SEED)
    if not isinstance(content, int):
        raise TypeError(f"expected an int, str or bytes as the id of content, received {type(content).__name__}")
    if not 0 <= content <= _U64:
        raise OverflowError(f"expected a content hash of 0 to 2^64 - 1, received {content}")
    return content
