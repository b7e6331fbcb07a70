"""Bookings as messages: what one Scheduler or a client tells of a booking, and such a booking booked here."""

from __future__ import annotations

import time

from kvrouter.runtime.errors import BadRequest
from kvrouter.runtime.packed_hashes import pack_sequence_hashes
from kvrouter.scheduler.bookings.table import Booking, Placement, booking_of
from kvrouter.scheduler.identifiers import Key, component_message, key_message, rank_message, rank_of
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.v1.scheduler_pb2 import ReassertBooking, SelectWorkerResponse
from kvrouter.v1.sync_pb2 import AddRequest


def add_request(booking: Booking, place: Placement, now: float) -> AddRequest:
    """A live booking, as the Scheduler that holds it at that place tells others of it."""
    counted = booking_of(booking)
    lease_until_unix_ns = 0 if booking.session_id else time.time_ns() + int((booking.lease_until - now) * 1e9)
    return AddRequest(
        booking=key_message(booking.key),
        rank=rank_message(place.rank),
        sequence_hashes=counted.sequence_hashes,
        local_hashes=booking.local_hashes,
        prompt_tokens=counted.prompt_tokens,
        prefill_tokens=place.prefill_tokens,
        overlap_blocks=booking.outcome.overlap_blocks,
        session_id=booking.session_id,
        lease_until_unix_ns=lease_until_unix_ns,
        tracks_active_blocks=counted.track_blocks,
        conversation=booking.conversation,
    )


def book_replicated(pool: Pool, key: Key, announced: ReassertBooking | AddRequest) -> Booking | None:
    """Books what was told. Returns its record, without an owner, or None where the key is booked already.

    Raises:
        BadRequest: the hashes do not fit the prompt, as where blocks have another size.
        TooLarge: there are as many bookings as may be.
    """
    hashes = announced.sequence_hashes if isinstance(announced, AddRequest) else pack_sequence_hashes(announced)
    block_size = pool.booked_load.block_size
    if announced.prompt_tokens == 0 or len(hashes) != 8 * (announced.prompt_tokens // block_size):
        raise BadRequest(
            f"expected {announced.prompt_tokens // block_size} hashes of 8 bytes for {announced.prompt_tokens} prompt "
            f"tokens in blocks of {block_size}, received {len(hashes)} bytes",
            field="sequence_hashes",
            advice="Send one hash for each full block of the prompt.",
        )
    prompt = Prompt(announced.prompt_tokens, b"", hashes)
    rank = rank_of(announced)
    prefill_tokens = min(announced.prefill_tokens, prompt.tokens)
    if not pool.booked_load.book(key, rank, prompt, prefill_tokens):
        return None
    candidate = pool.worker_set.candidate(rank)
    outcome = SelectWorkerResponse(
        rank=announced.rank,
        endpoint="" if candidate is None else candidate.endpoint,
        overlap_blocks=max(0, announced.prompt_tokens - announced.prefill_tokens) // block_size,
        prompt_blocks=prompt.blocks,
        prefill_tokens=prefill_tokens,
        component=component_message(pool.name),
        role=pool.role,
    )
    return Booking(key, pool.name, pool.booked_load, outcome, audited=False)
