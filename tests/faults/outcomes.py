"""What clients may see of a fault, and how that is compared with what they saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .fleet import WORKERS
from .traffic import Stream, expected_tokens

MayBeUnavailable = Callable[[Stream, str], bool]
"""Whether a stream may end with UNAVAILABLE instead of well, given the name of the process that a fault struck."""


def none(stream: Stream, struck: str) -> bool:
    return False


def those_through_it(stream: Stream, struck: str) -> bool:
    return stream.frontend == struck


def those_with_output_of_it(stream: Stream, struck: str) -> bool:
    return bool(stream.tokens) and stream.workers[-1] == WORKERS[struck]


def _expected(stream: Stream) -> list[int]:
    return expected_tokens(stream.seed, stream.prompt_tokens)


def judge(streams: Sequence[Stream], struck: str, may_be_unavailable: MayBeUnavailable) -> None:
    """Compares what clients saw with what they may see.

    Whatever becomes of a stream, each token that came is the expected one at its place.
    """
    wrong = [stream for stream in streams if stream.tokens != _expected(stream)[: len(stream.tokens)]]
    assert not wrong, f"tokens were lost, repeated or out of order: {_listed(wrong)}"
    failed = [
        stream
        for stream in streams
        if not stream.ok and not (stream.unavailable and may_be_unavailable(stream, struck))
    ]
    assert not failed, f"{len(failed)} of {len(streams)} streams ended as they must not: {_listed(failed)}"


def observed(streams: Sequence[Stream]) -> str:
    """What a report says of the streams."""
    unavailable = sum(stream.unavailable for stream in streams)
    longest = max((stream.ended or stream.began) - stream.began for stream in streams)
    load_only, decisions = sum(stream.load_only for stream in streams), sum(len(stream.workers) for stream in streams)
    return (
        f"{len(streams)} streams, {unavailable} unavailable, longest {longest:.1f} s, "
        f"{load_only} of {decisions} decisions without overlaps"
    )


def _listed(streams: Sequence[Stream]) -> str:
    return "".join(f"\n  {stream}" for stream in streams[:10])
