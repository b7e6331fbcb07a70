"""The bookings of one session, and the messages that inform a Scheduler of them.

Only the client knows which of its bookings are live. Each opening of the session, at whichever Scheduler, has a higher
opening number and lists every booking in use, so that the Scheduler can free those that ended while the session was
elsewhere. Re-asserts then add the bookings that the Scheduler lacks. Frees are repeated until a Scheduler has answered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import grpc
import structlog
from kvrouter.frontend.scheduler_client.live_bookings import Key, LiveBooking, key_of
from kvrouter.v1.common_pb2 import BookingKey
from kvrouter.v1.scheduler_pb2 import (
    CallFailed,
    FreeRequest,
    LiveBookings,
    MarkPrefillCompleteRequest,
    OpenSession,
    ReportOutputRequest,
    SessionRequest,
    SessionResponse,
)

log = structlog.get_logger(component="frontend")


class SessionBookings:
    """Live bookings, and selections and frees without a response. Does no I/O: it returns the messages to send."""

    def __init__(self, session_id: str, client_name: str) -> None:
        self._session_id = session_id
        self._client_name = client_name
        self._opening_numbers = itertools.count(1)
        self._call_ids = itertools.count(1)
        self._live: dict[Key, LiveBooking] = {}
        self._selecting: dict[Key, BookingKey] = {}
        self._frees: dict[int, FreeRequest] = {}
        self._asserting: dict[int, Key] = {}
        self._refused: set[Key] = set()

    def __len__(self) -> int:
        """Number of live bookings."""
        return len(self._live)

    @property
    def asserting(self) -> int:
        """Number of re-asserts that the current Scheduler has not answered."""
        return len(self._asserting)

    def numbered(self, request: SessionRequest) -> SessionRequest:
        """Assigns the session's next call id to a call."""
        request.call_id = next(self._call_ids)
        return request

    def opening(self) -> SessionRequest:
        """Returns the message that opens the session again. Calls on earlier streams will not be answered any more."""
        self._asserting.clear()
        self._refused.clear()
        keys = [booking.key for booking in self._live.values()]
        # A Scheduler may have booked these already. If it freed them now, it would refuse the repeated selection.
        keys += (key for name, key in self._selecting.items() if name not in self._live)
        return self.numbered(
            SessionRequest(
                open=OpenSession(
                    session_id=self._session_id,
                    client_name=self._client_name,
                    opening_number=next(self._opening_numbers),
                    live=LiveBookings(bookings=keys),
                )
            )
        )

    def opened(self) -> Iterator[SessionRequest]:
        """Yields what to send right after the session is opened: re-asserts of live bookings, then frees."""
        for key in self._live:
            yield self._reassert(key)
        for call_id, free in self._frees.items():
            yield SessionRequest(call_id=call_id, free=free)

    def refused(self) -> Iterator[SessionRequest]:
        """Yields re-asserts of the bookings that the Scheduler refused before."""
        refused, self._refused = self._refused, set()
        for key in refused & self._live.keys():
            yield self._reassert(key)

    def select(self, key: BookingKey) -> None:
        """Records a selection that may book this key from now on."""
        self._selecting[key_of(key)] = key

    def selected(self, key: BookingKey) -> None:
        """Records the end of a selection. The caller keeps or frees its booking in the same step."""
        self._selecting.pop(key_of(key), None)

    def keep(self, booking: LiveBooking) -> None:
        """Stores a booking until it is freed."""
        self._live[key_of(booking.key)] = booking

    def prefill_complete(self, booking: LiveBooking) -> SessionRequest:
        """Marks the prompt as computed and returns the message that reports it."""
        booking.prefill_complete = True
        return self.numbered(SessionRequest(mark_prefill_complete=MarkPrefillCompleteRequest(booking=booking.key)))

    def report_output(self, booking: LiveBooking, output_tokens: int) -> SessionRequest | None:
        """Sets the number of output tokens. Returns a message only if the request needs a further block."""
        fills = booking.fills_block(output_tokens)
        booking.output_tokens = output_tokens
        if not fills:
            return None
        return self.numbered(
            SessionRequest(report_output=ReportOutputRequest(booking=booking.key, output_tokens=output_tokens))
        )

    def free(self, key: BookingKey, cached_tokens: int | None = None) -> SessionRequest:
        """Ends a booking and returns the message that frees it."""
        self._live.pop(key_of(key), None)
        free = FreeRequest(booking=key, cached_tokens=cached_tokens)
        request = self.numbered(SessionRequest(free=free))
        self._frees[request.call_id] = free
        return request

    def answered(self, response: SessionResponse) -> None:
        """Processes the response to a re-assert or a free. Responses to other calls have no effect."""
        self._frees.pop(response.call_id, None)
        key = self._asserting.pop(response.call_id, None)
        if key is not None and response.HasField("failed"):
            self._note_refusal(key, response.failed)

    def _reassert(self, key: Key) -> SessionRequest:
        request = self.numbered(SessionRequest(reassert=self._live[key].to_reassert()))
        self._asserting[request.call_id] = key
        return request

    def _note_refusal(self, key: Key, failed: CallFailed) -> None:
        if failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
            # A repetition would be refused as well. The Scheduler does not account for this load until it ends.
            log.error("booking.refused", request_id=key[0], cause=failed.message)
            return
        self._refused.add(key)
