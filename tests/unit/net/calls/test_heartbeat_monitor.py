"""A peer is silent once several intervals in a row have brought nothing."""

from __future__ import annotations

from kvrouter.net.calls.limits import MISSES, HeartbeatMonitor


def test_a_peer_is_silent_after_the_last_of_the_missed_intervals() -> None:
    monitor = HeartbeatMonitor()
    monitor.heard()
    monitor.tick()
    for _ in range(MISSES):
        assert not monitor.silent
        monitor.tick()
    assert monitor.silent


def test_any_message_ends_the_silence() -> None:
    monitor = HeartbeatMonitor()
    for _ in range(MISSES + 1):
        monitor.tick()
    assert monitor.silent
    monitor.heard()
    assert not monitor.silent
    for _ in range(10 * MISSES):
        monitor.tick()
        monitor.heard()
        assert not monitor.silent


def test_a_freeze_of_the_own_process_counts_as_one_interval() -> None:
    monitor = HeartbeatMonitor()
    monitor.heard()
    monitor.tick()
    # However long the sleep between these two lasted.
    monitor.tick()
    assert not monitor.silent
