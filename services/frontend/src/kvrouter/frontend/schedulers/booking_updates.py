"""The bookings of one session, and the numbered updates that inform a Scheduler of them.

Only the client knows which of its bookings are live. Each opening of the session, at whichever Scheduler, has a higher
opening number and lists every booking in use, so the Scheduler can free those that ended while the session was
elsewhere. Re-asserts then add the bookings the Scheduler lacks. Updates are numbered over all openings, and sent
again until a Scheduler has acknowledged them.
"""

from __future__ import annotations

from collections import deque

import grpc
import msgspec
import structlog
from kvrouter.core import sequence_hashes
from kvrouter.runtime.booking_updates import (
    Free,
    Key,
    OutputReport,
    PrefillComplete,
    Reassert,
    Update,
    UpdateAnswer,
    UpdateCall,
    key_of,
)
from kvrouter.runtime.requests import add_sequence_hashes
from kvrouter.v1 import scheduler_pb2 as pb
from kvrouter.v1.common_pb2 import BookingKey, Component, Rank


class LiveBooking(msgspec.Struct, eq=False):
    """A live booking, with the progress of its request."""

    key: BookingKey
    value: Key
    """The same key as updates have it."""
    component: Component
    rank: Rank
    local_hashes: bytes
    """Packed u64, one for each full block of the prompt."""
    prompt_tokens: int
    prefill_tokens: int
    """Prompt tokens the rank had to compute when the request was booked."""
    block_size: int
    room: int
    """Output tokens that fit into its blocks so far."""
    sequences: int = 1
    """Number of sequences that the engine generates from the prompt."""
    prefill_complete: bool = False
    output_tokens: int = 0

    @classmethod
    def of(
        cls,
        key: BookingKey,
        selection: pb.SelectWorkerResponse,
        local_hashes: bytes,
        prompt_tokens: int,
        block_size: int,
        sequences: int = 1,
    ) -> LiveBooking:
        """Returns the booking a selection made."""
        return cls(
            key=key,
            value=key_of(key),
            component=selection.component,
            rank=selection.rank,
            local_hashes=local_hashes,
            prompt_tokens=prompt_tokens,
            prefill_tokens=selection.prefill_tokens
            if "prefill_tokens" in selection
            else max(0, prompt_tokens - selection.overlap_blocks * block_size),
            block_size=block_size,
            room=-prompt_tokens % block_size,
            sequences=sequences,
        )

    def __repr__(self) -> str:
        """Returns the key only: hashes are long, and say what the prompt is."""
        return f"LiveBooking({self.key.request_id!r}, attempt={self.key.attempt})"

    @property
    def predicted_cached_tokens(self) -> int:
        """Prompt tokens the Scheduler expected in the rank's cache."""
        return max(0, self.prompt_tokens - self.prefill_tokens)

    def to_reassert(self) -> pb.ReassertBooking:
        """Returns the message that re-asserts the booking at another Scheduler."""
        message = pb.ReassertBooking(
            booking=self.key,
            rank=self.rank,
            component=self.component,
            prompt_tokens=self.prompt_tokens,
            prefill_tokens=self.prefill_tokens,
            prefill_complete=self.prefill_complete,
            output_tokens=self.output_tokens,
            sequences=self.sequences if self.sequences > 1 else None,
        )
        add_sequence_hashes(message, sequence_hashes(self.local_hashes))
        return message


log = structlog.get_logger(component="frontend")

BATCH_BYTES = 48 << 10
"""Size at which a call takes no further update: below the size at which calls travel in parts and may be overtaken."""
_UPDATE_BYTES = 80
"""Most bytes of an update's numbers and tags."""
MAX_UPDATES = 65_536
"""Number of updates that may wait for their acknowledgement, besides re-asserts."""


class BookingUpdates:
    """Live bookings, selections without a response, and updates without acknowledgement. Does no I/O."""

    def __init__(self, session_id: str, client_name: str) -> None:
        self._session_id = session_id
        self._client_name = client_name
        self.opening_number = 0
        """Number of the last opening."""
        self.live: dict[LiveBooking, None] = {}
        """Live bookings, in the order in which they were made."""
        self.selecting: dict[int, BookingKey] = {}
        """Keys that running selections may book, by the id of the selection's object in memory. The caller keeps or
        frees the booking in the step that removes its key."""
        self._first = 1
        """Number of the oldest unacknowledged update."""
        self._sent: deque[Update] = deque()
        """Sent and unacknowledged updates."""
        self.unsent: deque[Update] = deque()
        """Updates following those."""
        self._grown: dict[LiveBooking, None] = {}
        """Live bookings that need further blocks, of which the next call informs the Scheduler."""
        self._asserting: dict[int, LiveBooking] = {}
        """Re-asserts without acknowledgement, by number."""
        self.refused: set[LiveBooking] = set()
        """Bookings the current Scheduler refused, to be re-asserted."""

    @property
    def asserting(self) -> int:
        """Number of re-asserts the current Scheduler has not acknowledged."""
        return len(self._asserting)

    @property
    def has_unsent(self) -> bool:
        """Whether the next call is more than a heartbeat."""
        return bool(self.unsent or self._grown)

    @property
    def waiting(self) -> int:
        """Number of unacknowledged updates."""
        return len(self._sent) + len(self.unsent) + len(self._grown)

    @property
    def overflowed(self) -> bool:
        """Whether too many updates wait for their acknowledgement. The next opening drops those it replaces.

        Re-asserts are not counted: the next opening would send them again.
        """
        return len(self._sent) + len(self.unsent) - len(self._asserting) > MAX_UPDATES

    def opening(self) -> pb.OpenSessionRequest:
        """Returns the call that opens the session again. Earlier calls will not be answered any more."""
        self.opening_number += 1
        self._asserting.clear()
        self.refused.clear()
        self._send_again()
        if self.overflowed:
            # The opening and the re-asserts say everything else.
            self._first += len(self.unsent)
            self.unsent = deque(update for update in self.unsent if isinstance(update, Free))
        keys = [booking.key for booking in self.live]
        # A Scheduler may have booked these already. If it freed them now, it would refuse the repeated selection.
        keys += self.selecting.values()
        return pb.OpenSessionRequest(
            session_id=self._session_id,
            client_name=self._client_name,
            opening_number=self.opening_number,
            live=pb.LiveBookings(bookings=keys),
            first_update=self._first,
        )

    def opened(self, response: pb.OpenSessionResponse) -> None:
        """Starts an opening: lost updates are sent again, and then each live booking is re-asserted."""
        while self.unsent and self._first <= response.acknowledged:
            self.unsent.popleft()
            self._first += 1
        for booking in self.live:
            self._reassert(booking)
        self._grown.clear()

    def closing(self) -> pb.CloseSessionRequest:
        """Returns the call that closes the last opening."""
        return pb.CloseSessionRequest(session_id=self._session_id, opening_number=self.opening_number)

    def assert_refused(self) -> int:
        """Adds re-asserts of the bookings the Scheduler refused before. Returns how many."""
        refused, self.refused = self.refused & self.live.keys(), set()
        for booking in refused:
            self._reassert(booking)
        return len(refused)

    def prefill_complete(self, booking: LiveBooking, handover_us: int | None = None) -> PrefillComplete:
        """Marks the prompt as computed and returns the update that reports it. ``handover_us`` as in the contract."""
        booking.prefill_complete = True
        return PrefillComplete(booking.value, handover_us)

    def report_output(self, booking: LiveBooking, output_tokens: int) -> None:
        """Sets the number of output tokens. The next call has it if the request needs a further block."""
        booking.output_tokens = output_tokens
        if output_tokens > booking.room:
            booking.room = output_tokens + -(booking.prompt_tokens + output_tokens) % booking.block_size
            self._grown[booking] = None

    def free(self, booking: LiveBooking, update: Free) -> None:
        """Ends a booking, and adds the update that frees it."""
        self.live.pop(booking, None)
        self._grown.pop(booking, None)
        self.unsent.append(update)

    def next_call(self) -> UpdateCall:
        """Returns the next call, with as many of the updates to send as fit; a heartbeat if there are none."""
        unsent, first = self.unsent, self._first + len(self._sent)
        if self._grown:
            unsent.extend(OutputReport(booking.value, booking.output_tokens) for booking in self._grown)
            self._grown.clear()
        updates: list[Update] = []
        size = 0
        while unsent and size < BATCH_BYTES:
            update = unsent.popleft()
            updates.append(update)
            if unsent:
                size += _largest(update)
        self._sent.extend(updates)
        return UpdateCall(self._session_id, self.opening_number, first, updates)

    def answered(self, response: UpdateAnswer, *, is_last: bool) -> bool:
        """Processes the answer to a call of the current opening. Returns whether updates must be sent again.

        Args:
            response: The answer.
            is_last: Whether no other call is unanswered. Updates that were sent then and are not acknowledged were
                overtaken by later ones.
        """
        for refused in response.refused:
            booking = self._asserting.get(refused.number)
            if booking is not None:
                self._note_refusal(booking, refused)
        sent, acknowledged = self._sent, response.acknowledged
        while sent and self._first <= acknowledged:
            sent.popleft()
            if self._asserting:
                self._asserting.pop(self._first, None)
            self._first += 1
        must_repeat = is_last and bool(sent)
        if must_repeat:
            self._send_again()
        return must_repeat

    def _send_again(self) -> None:
        self._sent.extend(self.unsent)
        self._sent, self.unsent = deque(), self._sent

    def _reassert(self, booking: LiveBooking) -> None:
        self._asserting[self._first + len(self._sent) + len(self.unsent)] = booking
        self.unsent.append(Reassert(booking.to_reassert()))

    def _note_refusal(self, booking: LiveBooking, refused: pb.RefusedUpdate) -> None:
        if refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
            # A repetition would be refused as well. The Scheduler does not account for this load until it ends.
            log.error("booking.refused", request_id=booking.key.request_id, cause=refused.message)
            return
        self.refused.add(booking)


def _largest(update: Update) -> int:
    """Returns the most bytes of an update as a message."""
    return _UPDATE_BYTES + (update.message.ByteSize() if isinstance(update, Reassert) else len(update.key[0].encode()))
