"""Updates of bookings as values and as messages."""

from __future__ import annotations

import pytest
from kvrouter.runtime.booking_updates import (
    Free,
    Key,
    OutputReport,
    PrefillComplete,
    Reassert,
    Update,
    UpdateAnswer,
    UpdateCall,
)
from kvrouter.v1.common_pb2 import BookingKey, LowerTiers, Stage
from kvrouter.v1.scheduler_pb2 import ReassertBooking, RefusedUpdate, UpdateBookingsRequest

KEY: Key = ("r~1", 2, Stage.STAGE_DECODE)


@pytest.mark.parametrize(
    "update",
    [
        PrefillComplete(KEY),
        PrefillComplete(KEY, 0),
        OutputReport(KEY, 17),
        Free(KEY),
        Free(KEY, 0, LowerTiers(host=3), 0, True),
        Reassert(ReassertBooking(booking=BookingKey(request_id="r"), prompt_tokens=3)),
        None,
    ],
    ids=repr,
)
def test_a_message_has_the_whole_update(update: Update | None) -> None:
    call = UpdateCall("session", 3, 7, [update, update])
    sent = call.to_message().SerializeToString()
    assert UpdateCall.of(UpdateBookingsRequest.FromString(sent)) == call


def test_a_number_that_does_not_fit_is_left_out() -> None:
    sent = UpdateCall("session", 3, 7, [Free(KEY, 1 << 32), PrefillComplete(KEY, 5)]).to_message()
    assert UpdateCall.of(sent).updates == [Free(KEY), PrefillComplete(KEY, 5)]


def test_a_message_has_the_whole_answer() -> None:
    answer = UpdateAnswer(9, [RefusedUpdate(number=8, code=3, message="no")])
    assert UpdateAnswer.of(answer.to_message()) == answer
