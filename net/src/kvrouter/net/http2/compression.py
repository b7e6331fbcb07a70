"""Compressed messages of gRPC calls."""

from __future__ import annotations

import zlib
from typing import Final

from kvrouter.net.http2.side import MessageTooLong

COMPRESSIONS: Final = (b"deflate", b"gzip")
"""The compressions that a server accepts."""
NOT_DECOMPRESSED: Final = (MessageTooLong, ValueError, zlib.error)
"""What ``decompressed`` raises."""
_ANY_FORMAT: Final = zlib.MAX_WBITS | 32
"""Makes zlib tell the two apart."""


def decompressed(message: bytes, max_bytes: int) -> bytes:
    """Returns the content of a compressed message.

    Raises:
        MessageTooLong: it is too long.
        ValueError, zlib.error: it is not compressed, or cut off.
    """
    decompressor = zlib.decompressobj(_ANY_FORMAT)
    content = decompressor.decompress(message, max_bytes)
    if decompressor.unconsumed_tail:
        raise MessageTooLong(f"expected messages of at most {max_bytes} bytes, received a longer one")
    if not decompressor.eof:
        raise ValueError("received a compressed message that is cut off")
    return content
