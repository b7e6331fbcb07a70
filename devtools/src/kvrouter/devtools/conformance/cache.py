"""Checks the events of a worker against its reported cached tokens."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from kvrouter.core import EventRecorder, Scope, local_hashes, sequence_hashes
from kvrouter.core.interface import RecorderCounts
from kvrouter.devtools.conformance.results import CheckFailed, CheckSkipped
from kvrouter.devtools.conformance.worker_under_test import CLIENT_ERRORS, Output, RankSnapshot, WorkerUnderTest
from kvrouter.publisher.errors import InvalidEvent
from kvrouter.v1.common_pb2 import RankState
from kvrouter.v1.events_pb2 import KvEvent, LoadReport
from kvrouter.v1.worker_pb2 import FinishReason

_BASE_SCOPE = Scope()
_OTHER_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CLIENT_SERVES_ELSEWHERE = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)


@dataclass(slots=True)
class CacheProbe:
    """A sent prompt with its outcome, from which later checks continue."""

    prompt: list[int] = field(default_factory=list)
    before: RankSnapshot | None = None
    """State of the rank before the prompt was first sent; None if it was not sent."""
    idle: LoadReport | None = None
    """Load of the rank then."""


async def check_completion(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Checks the output of a request."""
    # The last block stays partial with the token that is generated, if a block has three tokens or more.
    probe.prompt = worker.prompt(worker.options.prompt_blocks * worker.block_size + worker.block_size // 2)
    before, probe.idle = await worker.snapshot(), await worker.load()
    try:
        output = await worker.generate(worker.request(probe.prompt))
    except grpc.aio.AioRpcError as error:
        if error.code() in _CLIENT_SERVES_ELSEWHERE:
            raise CheckSkipped(f"the worker serves no requests: {error.details()}") from None
        raise
    probe.before = before
    if not output.token_ids or len(output.token_ids) > 1:
        raise CheckFailed(
            expected="1 token for max_tokens 1",
            received=f"{len(output.token_ids)} tokens",
            advice="generate at most stop_conditions.max_tokens tokens, and send each once.",
        )
    check_finish(output)
    return f"1 token for a prompt of {len(probe.prompt)} tokens"


def check_finish(output: Output) -> None:
    """Checks the finish reason of a served request.

    Raises:
        CheckFailed: it is missing, or names a failure.
    """
    finished = (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH)
    if output.finish_reason not in finished:
        raise CheckFailed(
            expected="a last piece with finish_reason STOP or LENGTH",
            received=FinishReason.Name(output.finish_reason),
            advice="set finish_reason in the last piece of each request: without it the request counts as failed.",
        )


async def check_published_blocks(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Checks the publication of the prompt's full blocks, with hashes of its tokens."""
    before = _sent(probe)
    expected = _sequences(probe.prompt, worker.block_size)

    async def published() -> bool | None:
        return await published_blocks(worker, probe.prompt) == len(expected) or None

    await worker.until(published)
    state = await worker.snapshot()
    resident = {block.sequence_hash for block in state.blocks}
    if not state.is_complete:
        raise CheckFailed(
            expected="a last chunk of GetRankState with last set",
            received=f"{len(state.blocks)} blocks without it",
            advice="set last in the last chunk: consumers drop a state that breaks off.",
        )
    missing = [number for number, each in enumerate(expected) if each not in resident]
    if missing:
        raise _missing(worker, probe, before, state, missing)
    return f"all {len(expected)} full blocks of the prompt"


def _missing(
    worker: WorkerUnderTest, probe: CacheProbe, before: RankSnapshot, state: RankSnapshot, missing: Sequence[int]
) -> CheckFailed:
    size, total = worker.block_size, len(probe.prompt) // worker.block_size
    expected = f"the {total} full blocks of {size} tokens of a prompt in the rank's state"
    known = {block.sequence_hash for block in before.blocks}
    new = [block for block in state.blocks if block.sequence_hash not in known]
    if not new:
        return CheckFailed(
            expected=expected,
            received="no new blocks",
            advice="report them with rank.stored() when the engine caches them, and check that prefix caching is on.",
        )
    sequences, locals_ = {block.sequence_hash for block in new}, {block.local_hash for block in new}
    received = f"{len(new)} new blocks, of which {total - len(missing)} are of the prompt"
    for other in {*_OTHER_SIZES, size // 2, size * 2} - {0, size}:
        if sequences.intersection(_sequences(probe.prompt, other)):
            return CheckFailed(
                expected=expected,
                received=f"blocks of {other} tokens of it",
                advice=f"the engine caches blocks of {other} tokens: set block_size to {other}, "
                f"or configure the engine to {size}.",
            )
    if sequences.intersection(_sequences(probe.prompt[1:], size)):
        return CheckFailed(
            expected=expected,
            received="blocks that begin with its second token",
            advice="pass the tokens from the first one of the sequence on: token_ids are those of the blocks alone.",
        )
    hashed = _unpacked(local_hashes(probe.prompt, size))
    if locals_.intersection(hashed[number] for number in missing):
        return CheckFailed(
            expected=expected,
            received="its blocks at other positions",
            advice="set parent to the engine hash of the block before the first one, and None only where a sequence "
            "starts.",
        )
    advice = (
        "pass the request's token ids unchanged, without tokens that the engine adds, and the scope of the request, "
        "which was none."
    )
    if len(missing) < total:
        advice = f"report every full block; the missing ones are {_listed(missing)}, counted from 0."
    return CheckFailed(expected=expected, received=received, advice=advice)


async def check_cached_tokens(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Sends the prompt again: the engine must find the blocks it published."""
    _sent(probe)
    return await _check_hit(worker, probe.prompt)


async def check_shared_prefix(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Sends a prompt with the same first blocks."""
    _sent(probe)
    shared = worker.options.prompt_blocks // 2 * worker.block_size
    if not shared:
        raise CheckSkipped("needs --prompt-blocks of 2 or more")
    # Its first different token ends what is shared at the border of a block.
    other = worker.prompt(len(probe.prompt) - shared)
    other[0] = probe.prompt[shared] % worker.options.largest_token + 1
    return await _check_hit(worker, [*probe.prompt[:shared], *other])


async def check_salt(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Sends the prompt with a cache salt: no block of the unsalted prompt may be reused, and its own are published."""
    _sent(probe)
    scope = Scope(cache_salt=secrets.token_hex(8))
    try:
        output = await worker.generate(worker.request(probe.prompt, scope=scope))
    except grpc.aio.AioRpcError as error:
        if error.code() in CLIENT_ERRORS:
            return f"refused with {error.code().name}"
        raise
    if output.cached_tokens:
        raise CheckFailed(
            expected="cached_tokens of 0 for a prompt with a salt that no request had before",
            received=str(output.cached_tokens),
            advice="make request.scope a part of what identifies a block, so that requests of different salts share "
            "none, or refuse requests that have one.",
        )

    async def published() -> bool | None:
        blocks = await published_blocks(worker, probe.prompt, scope)
        return blocks == len(probe.prompt) // worker.block_size or None

    if not await worker.until(published):
        raise CheckFailed(
            expected=f"the {len(probe.prompt) // worker.block_size} full blocks of a salted prompt in the rank's state",
            received=str(await published_blocks(worker, probe.prompt, scope)),
            advice="pass the scope of the request to rank.stored(): it is a part of the hashes.",
        )
    return f"{len(probe.prompt) // worker.block_size} blocks of its own"


async def _check_hit(worker: WorkerUnderTest, prompt: Sequence[int]) -> str:
    size = worker.block_size
    published = await published_blocks(worker, prompt)
    output = await worker.generate(worker.request(prompt))
    if output.cached_tokens is None:
        raise CheckSkipped(
            "the worker does not say cached_tokens, so its events cannot be compared with its cache; routing also "
            "learns from it"
        )
    if abs(output.cached_tokens - published * size) < size:
        return f"{output.cached_tokens} tokens for {published} published blocks of the prompt"
    if output.cached_tokens < published * size:
        advice = (
            "the engine does not have what it published: report each removal, set cached_tokens to the prompt tokens "
            "that were not computed, and check that prefix caching is on."
        )
    else:
        advice = (
            "the engine has more than it published, or counts other tokens: report each stored block, and set "
            "cached_tokens to the prompt tokens that were not computed."
        )
    raise CheckFailed(
        expected=f"cached_tokens of {published * size}: {published} blocks of {size} tokens of it are published",
        received=str(output.cached_tokens),
        advice=advice,
    )


async def published_blocks(worker: WorkerUnderTest, prompt: Sequence[int], scope: Scope = _BASE_SCOPE) -> int:
    """Returns the number of leading blocks of a prompt in the rank's state."""
    resident = {block.sequence_hash for block in (await worker.snapshot()).blocks}
    count = 0
    for each in _sequences(prompt, worker.block_size, scope):
        if each not in resident:
            break
        count += 1
    return count


async def check_event_log(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Checks the events since the first request: they must lead from the state before it to the current one."""
    before = _sent(probe)
    for snapshot in (before, after := await worker.snapshot()):
        digest = _recorder_of(snapshot).counts().digest
        if digest != snapshot.digest:
            raise CheckFailed(
                expected=f"digest {digest:#018x}, the sum over the blocks of GetRankState",
                received=f"{snapshot.digest:#018x}",
                advice="compute the digest as KvEventBatch.digest defines it: consumers compare it to find drift.",
            )
    try:
        batches = await worker.events(before.cursor)
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.OUT_OF_RANGE:
            raise CheckSkipped(f"the worker does not keep the events: {error.details()}") from None
        raise
    recorder, applied = _recorder_of(before), 0
    state = recorder.counts()
    for batch in batches:
        for event in batch.events:
            if event.event_id >= after.cursor.next_event_id:
                continue
            if event.event_id != state.next_event_id:
                raise CheckFailed(
                    expected=f"event {state.next_event_id}",
                    received=f"event {event.event_id}",
                    advice="number events from 0 without gaps in each incarnation.",
                )
            try:
                state = _applied(recorder, event)
            except InvalidEvent as error:
                raise CheckFailed(
                    expected="events that apply to the state before them",
                    received=f"event {event.event_id}: {error}",
                    advice="report blocks in the order in which the engine changed them.",
                ) from None
            applied += 1
    if (state.next_event_id, state.digest) != (after.cursor.next_event_id, after.digest):
        raise CheckFailed(
            expected=f"the state after event {after.cursor.next_event_id - 1}, with {len(after.blocks)} blocks",
            received=f"event {state.next_event_id - 1} as the last one of GetEvents, and {state.blocks} blocks",
            advice="GetEvents and GetRankState must agree: record a change once, in both.",
        )
    return f"{applied} events, {len(after.blocks)} blocks"


def _recorder_of(snapshot: RankSnapshot) -> EventRecorder:
    recorder = EventRecorder((0, 0, snapshot.cursor.incarnation, 0, snapshot.copy_counting), 1, 1)
    recorder.load([RankState(cursor=snapshot.cursor, blocks=snapshot.blocks).SerializeToString()])
    return recorder


def _applied(recorder: EventRecorder, event: KvEvent) -> RecorderCounts:
    """Reports the change of an event. Returns the numbers after it.

    Raises:
        InvalidEvent: the event does not apply to the recorded blocks.
    """
    match event.WhichOneof("change"):
        case "stored":
            stored = event.stored
            hashes = struct.pack(f"<{len(stored.local_hashes)}Q", *stored.local_hashes)
            parent = stored.parent_engine_hash if "parent_engine_hash" in stored else None
            return recorder.stored(list(stored.engine_hashes), hashes, parent, event.tier)
        case "removed":
            return recorder.removed(list(event.removed.engine_hashes), event.tier)
        case _:
            return recorder.cleared(event.tier)


def _sent(probe: CacheProbe) -> RankSnapshot:
    if probe.before is None:
        raise CheckSkipped("the first request was not served")
    return probe.before


def _sequences(prompt: Sequence[int], block_size: int, scope: Scope = _BASE_SCOPE) -> list[int]:
    return _unpacked(sequence_hashes(local_hashes(prompt, block_size, scope)))


def _unpacked(hashes: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(hashes) // 8}Q", hashes))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" and more" if len(numbers) > 8 else "")
