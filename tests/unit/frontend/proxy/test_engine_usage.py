"""The usage that an engine reports in a stream."""

from __future__ import annotations

import pytest
from kvrouter.frontend.proxy.engine_response import EngineResponse

CHUNK = b'data: {"choices":[{"delta":{"content":"hi"}}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n'
END = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("stream", "completion_tokens"),
    [
        (CHUNK * 3 + USAGE % 3 + END, 3),
        (USAGE % 1 + CHUNK + USAGE % 2, 2),
        (USAGE % 4 + CHUNK + END, 4),
        ((USAGE % 5 + CHUNK * 2 + END).replace(b"\n", b"\r\n"), 5),
        ((USAGE % 6).rstrip(), 6),
        (CHUNK * 3 + END, None),
        (USAGE % 7 + CHUNK * 2000, None),
        (b"\n\n", None),
        (b"", None),
    ],
    ids=["before the end", "last of two", "first", "line breaks of two", "unfinished", "none", "far away", "empty", ""],
)
@pytest.mark.parametrize("size", [1 << 20, 7])
def test_the_last_usage_of_a_stream_counts(stream: bytes, completion_tokens: int | None, size: int) -> None:
    response = EngineResponse(is_stream=True)
    for at in range(0, len(stream), size):
        piece = stream[at : at + size]
        assert response.take(piece) == piece
    usage = response.usage()
    assert (None if usage is None else usage.completion_tokens) == completion_tokens
