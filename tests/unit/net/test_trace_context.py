"""What a client sends beside its trace context passes on within the bounds of W3C."""

from __future__ import annotations

import pytest
from kvrouter.net.trace_context import accompanied, checked_companions, companions, entered, headers

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_repeated_headers_are_one_list() -> None:
    found = checked_companions(TRACEPARENT, ["a=1", " b=2 ,\tc=3"], ["x=1;property", "", ",y=2"])
    assert found == ("a=1,b=2,c=3", "x=1;property,y=2")


def test_a_tracestate_means_nothing_without_a_trace_context_and_baggage_does() -> None:
    assert checked_companions("", ["a=1"], ["x=1"]) == ("", "x=1")


def test_the_first_members_within_the_bounds_are_kept() -> None:
    many = [f"k{number}=1" for number in range(100)]
    found = checked_companions(TRACEPARENT, [",".join(many)], [",".join(many)])
    assert found.tracestate.split(",") == many[:32]
    assert found.baggage.split(",") == many[:64]
    long = checked_companions(TRACEPARENT, ["a=" + "1" * 300, "b=" + "1" * 207, "c=1"], ["x=" + "1" * 8190, "y=1"])
    assert len(long.tracestate) == 512
    assert len(long.baggage) == 8192


@pytest.mark.parametrize("member", ["a=\r\nevil: 1", "a=\udcff", "a=\u00e9", "a=\x00"])
def test_members_that_no_header_may_have_are_dropped(member: str) -> None:
    assert checked_companions(TRACEPARENT, [member, "b=2"], [member, "y=1"]) == ("b=2", "y=1")


def test_headers_have_what_the_running_code_serves() -> None:
    with entered(TRACEPARENT), accompanied(checked_companions(TRACEPARENT, ["a=1"], [])):
        assert headers() == {"traceparent": TRACEPARENT, "tracestate": "a=1"}
    assert headers() == {}
    assert companions() == ("", "")
