"""The decoding boundary: what it refuses, and what the quarantine counts, logs and releases."""

from __future__ import annotations

from collections import Counter

import pytest
from kvrouter.net import decoding
from kvrouter.net.decoding import Quarantine, Undecodable, decode_message, decode_text, printable
from kvrouter.v1.registry_pb2 import WorkerRegistration
from structlog.testing import capture_logs


def test_text_that_is_not_utf8_is_refused_with_a_printable_detail() -> None:
    with pytest.raises(Undecodable) as caught:
        decode_text(b"/a/\xff\n")
    assert caught.value.reason == "not_utf8"
    assert "/a/\\xff\\n" in str(caught.value)
    assert decode_text("ä".encode()) == "ä"


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(Undecodable) as caught:
        decode_message(WorkerRegistration, b"\xff\xff")
    assert caught.value.reason == "not_protobuf"
    assert "WorkerRegistration" in str(caught.value)


def test_every_name_is_printable() -> None:
    assert all(printable(bytes([each])).isprintable() for each in range(256))


def test_an_entry_is_counted_each_time_and_logged_once_until_it_heals() -> None:
    counts: Counter[tuple[str, str]] = Counter()
    quarantine = Quarantine(lambda source, reason: counts.update([(source, reason)]))
    error = Undecodable("not_utf8", "bytes")
    with capture_logs() as logs:
        for _ in range(5):
            quarantine.reject("etcd", "/a", error)
        quarantine.release("etcd", "/a")
        quarantine.release("etcd", "/a")
        quarantine.reject("etcd", "/a", error)
    assert counts == {("etcd", "not_utf8"): 6}
    events = [entry["event"] for entry in logs]
    assert events == ["entry.quarantined", "entry.released", "entry.quarantined"]
    assert quarantine.size == 1


def test_keys_and_causes_from_outside_are_logged_briefly_and_printably() -> None:
    quarantine = Quarantine()
    with capture_logs() as logs:
        quarantine.reject("etcd", "/a\n\x1b[2J" + "x" * 1_000_000, Undecodable("invalid", "\u202e" + "y" * 1_000_000))
        quarantine.release("etcd", "/a\n\x1b[2J" + "x" * 1_000_000)
    assert [entry["event"] for entry in logs] == ["entry.quarantined", "entry.released"]
    for value in (logs[0]["name"], logs[0]["detail"], logs[1]["name"]):
        assert value.isprintable()
        assert len(value) < 1_100


def test_entries_that_are_gone_from_a_listing_are_released() -> None:
    quarantine = Quarantine()
    for name in ("/a/1", "/a/2", "/b/1"):
        quarantine.reject("etcd", name, Undecodable("invalid", "x"))
    quarantine.reject("nats", "/a/1", Undecodable("invalid", "x"))
    quarantine.release_missing("etcd", "/a/", {"/a/2"})
    assert quarantine.size == 3


def test_a_full_quarantine_counts_and_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_MAX_ENTRIES", 3)
    counted = 0

    def count(_source: str, _reason: str) -> None:
        nonlocal counted
        counted += 1

    quarantine = Quarantine(count)
    with capture_logs() as logs:
        for number in range(10):
            quarantine.reject("nats", f"s.{number}", Undecodable("not_protobuf", "x"))
    assert (quarantine.size, counted) == (3, 10)
    assert [entry["event"] for entry in logs].count("entry.quarantined") == 3
