"""The booking table passes each change to the listeners of its kind."""

from __future__ import annotations

from kvrouter.scheduler.bookings.booking import (
    Booked,
    Booking,
    BookingChange,
    Freed,
    OutputGenerated,
    OwnerAdded,
    Placement,
)
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.load.booked_load import Accounting
from kvrouter.scheduler.load.pools import Pool
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse

from ..harness import prompt, view, worker


def test_listeners_receive_the_changes_of_their_kind_in_order() -> None:
    pool = Pool(view(worker(1)), Accounting(), report_age_seconds=10)
    booking = Booking(("r", 0, 1), pool, prompt(2), Placement((1, 0), 32), SelectWorkerResponse())
    table = BookingTable()
    received: list[tuple[str, BookingChange]] = []
    table.subscribe(Booked, lambda change: received.append(("first", change)))
    table.subscribe(OwnerAdded, lambda change: received.append(("first", change)))
    table.subscribe(Booked, lambda change: received.append(("second", change)))
    table.subscribe(Freed, lambda change: received.append(("second", change)))

    assert table.book(booking, table.here)
    table.add_owner(booking, (1, "other"), booking.placement)
    table.generated(booking, 5)
    table.free(booking.key)

    assert [(name, type(change)) for name, change in received] == [
        ("first", Booked),
        ("second", Booked),
        ("first", OwnerAdded),
        ("second", Freed),
    ]
    assert not any(isinstance(change, OutputGenerated) for _, change in received)
