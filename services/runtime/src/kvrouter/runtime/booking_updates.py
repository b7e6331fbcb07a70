"""The updates of a session's bookings as plain values.

A Scheduler takes them from a Frontend of its process as they are: messages take several times as long to build and
read as the change of a booking. ``protos/kvrouter/v1/scheduler.proto`` defines the fields.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog
from kvrouter.v1 import scheduler_pb2 as pb
from kvrouter.v1.common_pb2 import BookingKey, LowerTiers, Stage

log = structlog.get_logger(component="frontend")

_WHOLE = Stage.STAGE_WHOLE  # read once: looking up an enum value by name takes a third of a microsecond

Key = tuple[str, int, Stage]
"""(request_id, attempt, stage), the stage never unspecified."""


def key_of(key: BookingKey) -> Key:
    """Returns the key of a message, which can be hashed."""
    return (key.request_id, key.attempt, key.stage or _WHOLE)


def key_message(key: Key) -> BookingKey:
    """Returns a key as a message."""
    request_id, attempt, stage = key
    return BookingKey(request_id=request_id, attempt=attempt, stage=stage)


class PrefillComplete(msgspec.Struct):
    """The prompt of a booking is computed."""

    key: Key
    handover_us: int | None = None
    """Time from the end of a prefill elsewhere to the first token, microseconds; None if unknown."""

    @classmethod
    def of(cls, message: pb.MarkPrefillCompleteRequest) -> PrefillComplete:
        """Returns the update in a message."""
        return cls(key_of(message.booking), message.handover_us if "handover_us" in message else None)

    def write(self, message: pb.BookingUpdate) -> None:
        """Writes the update into an empty message."""
        message.prefill_complete.booking.CopyFrom(key_message(self.key))
        if self.handover_us is not None:
            message.prefill_complete.handover_us = self.handover_us


class OutputReport(msgspec.Struct):
    """A booking has generated so many tokens."""

    key: Key
    output_tokens: int

    @classmethod
    def of(cls, message: pb.ReportOutputRequest) -> OutputReport:
        """Returns the update in a message."""
        return cls(key_of(message.booking), message.output_tokens)

    def write(self, message: pb.BookingUpdate) -> None:
        """Writes the update into an empty message."""
        message.output.booking.CopyFrom(key_message(self.key))
        message.output.output_tokens = self.output_tokens


class Free(msgspec.Struct):
    """A booking has ended."""

    key: Key
    cached_tokens: int | None = None
    """Prompt tokens found in the worker's cache; None if unknown."""
    lower_cached_tokens: LowerTiers | None = None
    """Those of them from below device memory; None if there are none, or if unknown."""
    output_tokens: int | None = None
    """Length of its output; None if that broke off, or if unknown."""
    prefill_complete: bool = False
    """Whether its prompt is computed as well."""

    @classmethod
    def of(cls, message: pb.FreeRequest) -> Free:
        """Returns the update in a message."""
        return cls(
            key_of(message.booking),
            message.cached_tokens if "cached_tokens" in message else None,
            message.lower_cached_tokens if "lower_cached_tokens" in message else None,
            message.output_tokens if "output_tokens" in message else None,
            message.prefill_complete,
        )

    def write(self, message: pb.BookingUpdate) -> None:
        """Writes the update into an empty message."""
        freeing = message.free
        freeing.booking.CopyFrom(key_message(self.key))
        if self.cached_tokens is not None:
            freeing.cached_tokens = self.cached_tokens
        if self.lower_cached_tokens is not None:
            freeing.lower_cached_tokens.CopyFrom(self.lower_cached_tokens)
        if self.output_tokens is not None:
            freeing.output_tokens = self.output_tokens
        freeing.prefill_complete = self.prefill_complete


class Reassert(msgspec.Struct):
    """A booking lives, whether or not the Scheduler knows it."""

    message: pb.ReassertBooking

    def write(self, message: pb.BookingUpdate) -> None:
        """Writes the update into an empty message."""
        message.reassert.CopyFrom(self.message)


Update = PrefillComplete | OutputReport | Free | Reassert


def _update_of(message: pb.BookingUpdate) -> Update | None:
    """Returns the update in a message; None if it is empty."""
    if "output" in message:
        return OutputReport.of(message.output)
    if "free" in message:
        return Free.of(message.free)
    if "prefill_complete" in message:
        return PrefillComplete.of(message.prefill_complete)
    return Reassert(message.reassert) if "reassert" in message else None


class UpdateCall(msgspec.Struct):
    """Consecutive updates of a session's bookings."""

    session_id: str
    opening_number: int
    first_number: int
    """Number of the first update."""
    updates: Sequence[Update | None]
    """None for an update without content, which is refused."""

    @classmethod
    def of(cls, request: pb.UpdateBookingsRequest) -> UpdateCall:
        """Returns the call in a message."""
        # A copy, since the container's own iterator ends with an error, whose text takes longer than the copy.
        updates = [_update_of(update) for update in request.updates[:]]
        return cls(request.session_id, request.opening_number, request.first_number, updates)

    def to_message(self) -> pb.UpdateBookingsRequest:
        """Returns the call as a message."""
        request = pb.UpdateBookingsRequest(
            session_id=self.session_id, opening_number=self.opening_number, first_number=self.first_number
        )
        for update in self.updates:
            message = request.updates.add()
            if update is not None:
                try:
                    update.write(message)
                except ValueError:  # A number does not fit. The key, which comes first, is written.
                    log.exception("update.incomplete", update=repr(update))
        return request


class UpdateAnswer(msgspec.Struct):
    """The answer to a call with updates."""

    acknowledged: int
    """Number of the last update, applied or refused."""
    refused: Sequence[pb.RefusedUpdate] = ()

    @classmethod
    def of(cls, response: pb.UpdateBookingsResponse) -> UpdateAnswer:
        """Returns the answer in a message."""
        return cls(response.acknowledged, response.refused[:])

    def to_message(self) -> pb.UpdateBookingsResponse:
        """Returns the answer as a message."""
        return pb.UpdateBookingsResponse(acknowledged=self.acknowledged, refused=self.refused)
