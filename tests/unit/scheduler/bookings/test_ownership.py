"""Bookings go exactly once: freed, with their session after its grace, or at the end of their lease."""

from __future__ import annotations

import pytest
from kvrouter.scheduler.bookings.booking import Booking, Freed, Placement, SessionEnded
from kvrouter.scheduler.bookings.ownership import SILENT_TICKS, BookingFreed, BookingOwnership
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.load.booked_load import Accounting
from kvrouter.scheduler.load.pools import Pool
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.error_encoding import from_parts, to_parts
from kvrouter.v1.errors import RequestIdReused, SessionLost
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse

from ..harness import prompt, view, worker

RANK = (1, 0)


class Books:
    def __init__(self, *, grace: float = 10.0, tombstones: int = 1 << 16) -> None:
        self.pool = Pool(view(worker(1)), Accounting(), report_age_seconds=10)
        self.booking_table = BookingTable(tombstones=tombstones)
        self.booking_table.subscribe(Freed, self._freed)
        self.booking_table.subscribe(SessionEnded, lambda change: self._ended.append(change))
        self.booking_ownership = BookingOwnership(self.booking_table, session_grace_seconds=grace)
        self._expired: list[Booking] = []
        self._ended: list[SessionEnded] = []

    def book(self, name: str, *, session: str = "", lease: float = 100.0, now: float = 0.0) -> Booking:
        key = (name, 0, int(Stage.STAGE_WHOLE))
        self.booking_ownership.check_bookable(key, session)
        placement = Placement(RANK, 32)
        booking = Booking(
            key, self.pool, prompt(2), placement, SelectWorkerResponse(), session_id=session, lease_seconds=lease
        )
        assert self.booking_ownership.book(booking, now)
        return booking

    def expired(self, now: float) -> list[Booking]:
        """The bookings whose lease ends at that time."""
        self._expired.clear()
        self.booking_ownership.expire(now)
        return list(self._expired)

    def ended(self, now: float) -> list[SessionEnded]:
        """The sessions whose grace ends at that time."""
        self._ended.clear()
        self.booking_ownership.expire(now)
        return list(self._ended)

    def requests(self) -> int:
        return self.pool.booked_load.load_by_rank()[RANK].requests

    def _freed(self, change: Freed) -> None:
        if change.booking is not None and change.is_expired:
            self._expired.append(change.booking)


def test_a_session_takes_its_bookings_with_it_after_the_grace() -> None:
    books = Books(grace=10)
    books.booking_ownership.open_session("s", "c")
    books.book("a", session="s")
    books.book("b", session="s")
    books.book("c")
    books.booking_ownership.close_session("s", now=5)
    assert books.ended(14.9) == []
    assert books.requests() == 3
    ended = books.ended(15)
    assert [(each.session_id, each.client_name, len(each.bookings)) for each in ended] == [("s", "c", 2)]
    assert (books.requests(), len(books.booking_table), books.booking_ownership.sessions) == (1, 1, 0)
    assert books.ended(16) == []


def test_a_session_that_is_reopened_keeps_its_bookings() -> None:
    books = Books(grace=10)
    books.booking_ownership.open_session("s", "c")
    books.book("a", session="s")
    books.booking_ownership.close_session("s", now=0)
    books.booking_ownership.open_session("s", "c")
    assert books.ended(1000) == []
    assert books.requests() == 1


def test_the_end_of_an_opening_that_was_replaced_ends_nothing() -> None:
    books = Books(grace=10)
    books.booking_ownership.open_session("s", "c", 1)
    books.booking_ownership.open_session("s", "c", 2)
    books.book("a", session="s")
    assert not books.booking_ownership.close_session("s", now=0, opening_number=1)
    assert books.ended(1000) == []
    assert books.booking_ownership.close_session("s", now=1000, opening_number=2)
    assert len(books.ended(1010)) == 1
    assert books.requests() == 0


def test_a_session_that_no_call_names_is_silent() -> None:
    books = Books(grace=10)
    books.booking_ownership.open_session("s", "c")
    books.booking_ownership.open_session("other", "c")
    for _ in range(SILENT_TICKS):
        assert books.booking_ownership.tick() == []
        books.booking_ownership.check_open("other")
    assert books.booking_ownership.tick() == ["s"]
    books.booking_ownership.close_session("s", now=0)
    assert books.booking_ownership.tick() == []


def test_sessions_without_bookings_leave_nothing() -> None:
    books = Books(grace=10)
    for number in range(10_000):
        books.booking_ownership.open_session(f"s{number}", "c")
        books.booking_ownership.close_session(f"s{number}", now=0)
    assert books.booking_ownership.sessions == 0


def test_a_session_that_is_not_open_owns_nothing_new() -> None:
    books = Books()
    with pytest.raises(SessionLost):
        books.booking_ownership.check_bookable(("a", 0, 1), "s")
    books.booking_ownership.open_session("s", "c")
    books.book("a", session="s")
    books.booking_ownership.close_session("s", now=0)
    with pytest.raises(SessionLost):
        books.booking_ownership.check_bookable(("b", 0, 1), "s")


def test_a_lease_is_renewed_by_whatever_names_it() -> None:
    books = Books()
    booking = books.book("a", lease=10, now=0)
    books.booking_table.find(booking.key, now=9)
    assert books.expired(18.9) == []
    assert books.expired(19) == [booking]
    assert books.requests() == 0
    assert books.expired(100) == []


def test_a_freed_lease_does_not_run_out() -> None:
    books = Books()
    booking = books.book("a", lease=10)
    assert books.booking_table.free(booking.key) is booking
    assert books.booking_table.free(booking.key) is None
    assert books.expired(100) == []


def test_what_freed_leases_leave_behind_is_bounded() -> None:
    books = Books()
    for number in range(10_000):
        books.booking_table.free(books.book(f"r{number}", lease=3600).key)
    assert len(books.booking_ownership._leases) < 2_000


def test_a_booking_moves_between_owners() -> None:
    books = Books(grace=10)
    leased = books.book("a", lease=10)
    books.booking_ownership.open_session("s1", "c")
    books.booking_ownership.open_session("s2", "c")
    books.booking_ownership.adopt(leased, "s1", Placement(RANK, 32))
    assert books.expired(1000) == []
    books.booking_ownership.adopt(leased, "s2", Placement(RANK, 32))
    books.booking_ownership.close_session("s1", now=0)
    books.booking_ownership.expire(1000)
    assert books.requests() == 1


def test_a_freed_key_is_not_booked_again() -> None:
    books = Books()
    books.booking_table.free(("a", 0, 1))
    with pytest.raises(BookingFreed, match="freed already"):
        books.booking_ownership.check_bookable(("a", 0, 1), "")
    books.booking_ownership.check_bookable(("a", 1, 1), "")


def test_keys_that_went_with_their_owner_are_not_booked_again() -> None:
    books = Books(grace=10)
    books.booking_ownership.open_session("s", "c")
    in_session = books.book("a", session="s").key
    leased = books.book("b", lease=5).key
    books.booking_ownership.close_session("s", now=0)
    books.booking_ownership.expire(100)
    for key in (in_session, leased):
        with pytest.raises(BookingFreed):
            books.booking_ownership.check_bookable(key, "")


def test_tombstones_are_bounded_and_the_newest_stay() -> None:
    books = Books(tombstones=3)
    for number in range(5):
        books.booking_table.free((f"r{number}", 0, 1))
    books.booking_table.free(("r2", 0, 1))
    assert [books.booking_table.was_freed((f"r{number}", 0, 1)) for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_booking_freed_crosses_the_wire_as_a_reused_id() -> None:
    restored = from_parts(*to_parts(BookingFreed("a")))
    assert isinstance(restored, RequestIdReused)
    assert "freed already" in restored.message


def test_a_session_that_is_reopened_frees_what_its_client_no_longer_lists() -> None:
    books = Books(grace=10)
    books.booking_ownership.open_session("s", "c", 1)
    kept, ended = books.book("a", session="s"), books.book("b", session="s")
    books.booking_ownership.open_session("other", "c", 1)
    books.book("c", session="other")
    leased = books.book("d")
    books.booking_ownership.close_session("s", now=0)
    books.booking_ownership.open_session("s", "c", 2)
    assert books.booking_ownership.free_all_but("s", {kept.key, leased.key}) == 1
    assert {booking.key[0] for booking in books.booking_table} == {"a", "c", "d"}
    assert books.booking_table.was_freed(ended.key)


def test_an_opening_that_another_has_overtaken_is_refused() -> None:
    books = Books()
    books.booking_ownership.open_session("s", "c", 2)
    for opening_number in (1, 2):
        with pytest.raises(SessionLost):
            books.booking_ownership.open_session("s", "c", opening_number)
    books.booking_ownership.open_session("s", "c", 3)
    # A client that does not number its openings always replaces the one before.
    books.booking_ownership.open_session("s", "c")


def test_an_opening_that_was_replaced_books_nothing() -> None:
    books = Books()
    books.booking_ownership.open_session("s", "c", 1)
    books.booking_ownership.open_session("s", "c", 2)
    with pytest.raises(SessionLost):
        books.booking_ownership.check_bookable(("a", 0, 1), "s", 1)
    with pytest.raises(SessionLost):
        books.booking_ownership.check_open("s", 1)
    books.booking_ownership.check_bookable(("a", 0, 1), "s", 2)


def test_a_selection_is_repeated_in_a_session_whose_booking_was_dropped_but_never_freed() -> None:
    books = Books(grace=10)
    books.booking_ownership.open_session("s", "c")
    dropped, freed = books.book("a", session="s").key, books.book("b", session="s").key
    books.booking_table.free(freed)
    books.booking_ownership.close_session("s", now=0)
    books.booking_ownership.expire(100)
    books.booking_ownership.open_session("s", "c")
    books.booking_ownership.check_bookable(dropped, "s")
    with pytest.raises(BookingFreed):
        books.booking_ownership.check_bookable(freed, "s")
