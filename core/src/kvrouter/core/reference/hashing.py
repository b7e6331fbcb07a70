"""Hashes of blocks and of prefixes.

``local[i]    = XXH3-64(tokens of block i as le32 ‖ le64 of each multimodal hash at block i, in the order given; seed)``
``sequence[0] = local[0]``
``sequence[i] = XXH3-64(le64(sequence[i-1]) ‖ le64(local[i]); 1337)``

Each scope has a seed of its own:

- no scope: 1337
- LoRA adapter only: 1337 + XXH3-64(name as UTF-8; 0), mod 2^64
- salt or tenant set: XXH3-64(le32(length) ‖ UTF-8, of the adapter, then the salt, then the tenant; 1337)

The first two are equal to those of Dynamo 1.6. Lengths are in bytes; an absent part has length 0. Only full blocks are
hashed. ``hash_vectors.json`` beside this package has examples for implementations in other languages.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator, Sequence

from kvrouter.core.interface import Scope, TokenBuffer
from xxhash import xxh3_64_intdigest

SEED = 1337
_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1
_BYTES = frozenset("Bbc")
_WORDS = frozenset("QL")


def local_hashes(
    token_ids: TokenBuffer,
    block_size: int,
    scope: Scope = Scope(),  # noqa: B008 (immutable)
    multimodal: Sequence[tuple[int, int]] = (),
) -> bytes:
    """Returns the local hashes of the full blocks of a prompt, packed as little-endian u64.

    Args:
        token_ids: The prompt. A buffer of bytes is read as little-endian u32, one of 32-bit integers as it is.
        block_size: Tokens per block, 1 or more.
        scope: Adapter, salt and tenant.
        multimodal: (block index, content hash) pairs. The order of pairs of one block matters; pairs after the last
            full block have no effect.

    Raises:
        ValueError: the block size is below 1, or the number of bytes is not a multiple of 4.
        OverflowError: a token id is outside u32, a block index is outside u32, or a content hash is outside u64.
        TypeError: a token is not an integer.
    """
    if block_size < 1:
        raise ValueError(f"expected a block size of 1 or more, received {block_size}")
    tokens = le32(token_ids)
    appended = _by_block(multimodal)
    seed = scope_seed(scope)
    width = 4 * block_size
    hashes = (
        xxh3_64_intdigest(tokens[start : start + width] + appended.get(start // width, b""), seed)
        for start in range(0, len(tokens) - width + 1, width)
    )
    return pack(hashes)


def sequence_hashes(local: bytes) -> bytes:
    """Returns the packed sequence hashes of packed local hashes from the start of a sequence.

    Raises:
        TypeError: the argument is neither bytes nor a buffer of unsigned 64-bit integers.
        ValueError: the number of bytes is not a multiple of 8, or the buffer is not contiguous.
    """
    return pack(chain(None, unpack(local)))


def scope_seed(scope: Scope) -> int:
    """Returns the seed of the local hashes of a scope."""
    lora = scope.lora_name.encode()
    if scope.cache_salt or scope.tenant:
        parts = (lora, scope.cache_salt.encode(), scope.tenant.encode())
        return xxh3_64_intdigest(b"".join(struct.pack("<I", len(part)) + part for part in parts), SEED)
    return (SEED + xxh3_64_intdigest(lora, 0)) & _U64 if lora else SEED


def chain(parent: int | None, local: Iterable[int]) -> Iterator[int]:
    """Yields the sequence hashes of a chain of blocks below the sequence hash ``parent``; None starts a sequence."""
    for one in local:
        parent = one if parent is None else xxh3_64_intdigest(struct.pack("<QQ", parent, one), SEED)
        yield parent


def pack(hashes: Iterable[int]) -> bytes:
    """Packs hashes as little-endian u64."""
    numbers = list(hashes)
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack(packed: bytes) -> tuple[int, ...]:
    """Unpacks hashes from little-endian u64.

    Raises:
        TypeError: the argument is neither bytes nor a buffer of unsigned 64-bit integers.
        ValueError: the number of bytes is not a multiple of 8, or the buffer is not contiguous.
    """
    view = memoryview(packed)
    if view.format not in _BYTES and not (view.format in _WORDS and view.itemsize == 8 and sys.byteorder == "little"):
        raise TypeError("packed hashes are bytes, or unsigned 64-bit integers")
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous")
    if view.nbytes % 8:
        raise ValueError(f"{view.nbytes} bytes are no whole number of 64-bit hashes")
    return struct.unpack(f"<{view.nbytes // 8}Q", view.tobytes())


def le32(token_ids: TokenBuffer) -> bytes:
    """Token ids as little-endian u32. Raises the errors of ``local_hashes``."""
    try:
        view = memoryview(token_ids)  # type: ignore[arg-type]
    except TypeError:
        return _array_of(token_ids)
    if view.format in _BYTES:
        if view.nbytes % 4:
            raise ValueError(f"{view.nbytes} bytes are no whole number of 32-bit token ids")
        return view.tobytes()
    if view.format == "I" and sys.byteorder == "little":
        return view.tobytes()
    try:
        numbers = view.tolist()
    except NotImplementedError:  # a byte order that is not the machine's
        numbers = list(token_ids)
    return _array_of(numbers)


def _array_of(numbers: Iterable[int]) -> bytes:
    numbers = list(numbers)
    try:
        return struct.pack(f"<{len(numbers)}I", *numbers)
    except struct.error:
        for number in numbers:
            if not isinstance(number, int) and not hasattr(number, "__index__"):
                raise TypeError(f"{number!r} is no token id") from None
        raise OverflowError(f"token ids are 0 to {_U32}") from None


def _by_block(multimodal: Sequence[tuple[int, int]]) -> dict[int, bytes]:
    appended: dict[int, bytes] = {}
    for block_index, content_hash in multimodal:
        if not 0 <= block_index <= _U32:
            raise OverflowError(f"the block index {block_index} is outside u32")
        if not 0 <= content_hash <= _U64:
            raise OverflowError(f"the content hash {content_hash} is outside u64")
        appended[block_index] = appended.get(block_index, b"") + struct.pack("<Q", content_hash)
    return appended
