"""Conversions between a booking and its replication messages."""

from __future__ import annotations

import time

from kvrouter.runtime.requests import pack_sequence_hashes
from kvrouter.scheduler.bookings.booking import Booking, Placement
from kvrouter.scheduler.identifiers import Key, component_message, key_message, rank_message, rank_of
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.scheduler_pb2 import ReassertBooking, SelectWorkerResponse
from kvrouter.v1.sync_pb2 import AddRequest


def add_request(booking: Booking, placement: Placement, now: float) -> AddRequest:
    """Returns an owner's announcement of a booking at ``placement``. ``now`` is in seconds."""
    lease_until_unix_ns = 0 if booking.session_id else time.time_ns() + int((booking.lease_until - now) * 1e9)
    return AddRequest(
        booking=key_message(booking.key),
        rank=rank_message(placement.rank),
        sequence_hashes=booking.prompt.sequence_hashes,
        local_hashes=booking.prompt.local_hashes,
        prompt_tokens=booking.prompt.tokens,
        prefill_tokens=placement.prefill_tokens,
        overlap_blocks=booking.outcome.overlap_blocks,
        session_id=booking.session_id,
        lease_until_unix_ns=lease_until_unix_ns,
        tracks_active_blocks=booking.pool.booked_load.tracks_blocks(booking.key[2]),
        conversation=booking.conversation,
    )


def placement_of(announced: ReassertBooking | AddRequest) -> Placement:
    """Returns where another Scheduler or its client has a booking."""
    return Placement(rank_of(announced), min(announced.prefill_tokens, announced.prompt_tokens))


def replicated_booking(pool: Pool, key: Key, announced: ReassertBooking | AddRequest) -> Booking:
    """Returns a booking as another Scheduler or its client describes it, without owners.

    Raises:
        BadRequest: the hashes do not fit the prompt, as where blocks have another size.
    """
    local_hashes, conversation = b"", b""
    if isinstance(announced, AddRequest):
        hashes, local_hashes = announced.sequence_hashes, announced.local_hashes
        conversation = announced.conversation
    else:
        hashes = pack_sequence_hashes(announced)
    block_size = pool.booked_load.block_size
    if announced.prompt_tokens == 0 or len(hashes) != 8 * (announced.prompt_tokens // block_size):
        raise BadRequest(
            f"expected {announced.prompt_tokens // block_size} hashes of 8 bytes for {announced.prompt_tokens} prompt "
            f"tokens in blocks of {block_size}, received {len(hashes)} bytes",
            field="sequence_hashes",
            advice="Send one hash for each full block of the prompt.",
        )
    prompt = Prompt(announced.prompt_tokens, local_hashes if len(local_hashes) == len(hashes) else b"", hashes)
    placement = placement_of(announced)
    candidate = pool.worker_set.candidate(placement.rank)
    outcome = SelectWorkerResponse(
        rank=announced.rank,
        endpoint="" if candidate is None else candidate.endpoint,
        overlap_blocks=max(0, announced.prompt_tokens - announced.prefill_tokens) // block_size,
        prompt_blocks=prompt.blocks,
        prefill_tokens=placement.prefill_tokens,
        component=component_message(pool.name),
        role=pool.role,
    )
    return Booking(key, pool, prompt, placement, outcome, conversation=conversation)
