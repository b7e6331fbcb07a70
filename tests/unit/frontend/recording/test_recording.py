"""A recording says how long requests are and what they share, and no more; nothing that a disk does stops it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import local_hashes
from kvrouter.frontend.recording import recorder as recording
from kvrouter.frontend.recording.recorder import BlockIds, Outline, Recorder, RecordingFile
from prometheus_client import CollectorRegistry

WIDTH = 4


def outline(tokens: list[int], output_tokens: int = 3, at_ms: int = 1000) -> Outline:
    return Outline(at_ms * 1_000_000, "m", WIDTH, len(tokens), local_hashes(tokens, WIDTH), output_tokens)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ids(path: Path) -> list[list[int]]:
    return [fields["hash_ids"] for fields in read(path)]


ONE = [1] * 4 + [2] * 4
OTHER = [1] * 4 + [3] * 4


def test_a_line_has_lengths_and_ids_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    RecordingFile(path, 1 << 20).append([outline([*ONE, 9, 9], output_tokens=7, at_ms=1234)])
    assert read(path) == [
        {
            "timestamp": 1234.0,
            "input_length": 10,
            "output_length": 7,
            "hash_ids": [0, 1, 2],
            "piece_tokens": WIDTH,
            "model": "m",
        }
    ]
    assert path.stat().st_mode & 0o077 == 0, "others may read it"


def test_equal_blocks_have_equal_ids_and_tails_their_own(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    file = RecordingFile(path, 1 << 20)
    file.append([outline([*ONE, 9]), outline(OTHER)])
    file.append([outline([*ONE, 9]), outline([9])])
    assert ids(path) == [[0, 1, 2], [0, 3], [0, 1, 4], [5]]


blocks = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@given(st.lists(st.lists(st.one_of(blocks, st.just("restart"), st.just("fail")), max_size=4), max_size=8))
def test_ids_are_unique_over_restarts_and_failures(
    tmp_path_factory: pytest.TempPathFactory, script: list[list[Any]]
) -> None:
    """A naive reader finds a block behind each id: never two, whatever restarts and failures lie between."""
    path = tmp_path_factory.mktemp("recording") / "r.jsonl"
    file = RecordingFile(path, 1 << 20)
    sent: list[list[int]] = []
    for batch in script:
        for action in batch:
            if action == "restart":
                file = RecordingFile(path, 1 << 20)
            elif action == "fail":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(os, "write", lambda fd, data: torn(fd, data))
                    assert file.append([outline([number] * WIDTH) for number in range(6, 9)]).failure
            else:
                assert file.append([outline([token for block in action for token in [block] * WIDTH])]).requests == 1
                sent.append(action)
    meaning: dict[int, int] = {}
    written = ids(path) if path.exists() else []
    assert [len(numbers) for numbers in written] == [len(content) for content in sent]
    for numbers, content in zip(written, sent, strict=True):
        for number, block in zip(numbers, content, strict=True):
            assert meaning.setdefault(number, block) == block


_write = os.write


def torn(descriptor: int, data: bytes) -> int:
    """A disk that fills up in the middle of a line."""
    if len(data) < 20:
        raise OSError(28, "No space left on device")
    return _write(descriptor, data[:11])


def test_a_full_disk_loses_only_the_records_that_did_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    file = RecordingFile(path, 1 << 20)
    file.append([outline(ONE)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", torn)
        lost = file.append([outline(OTHER), outline(ONE)])
    assert (lost.requests, "No space" in lost.failure, lost.size) == (0, True, path.stat().st_size)
    assert file.append([outline(OTHER)]).requests == 1
    assert [len(numbers) for numbers in ids(path)] == [2, 2]


def test_an_unreadable_recording_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    RecordingFile(path, 1 << 20).append([outline(ONE)])

    def unreadable(descriptor: int, length: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    again = RecordingFile(path, 1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", unreadable)
        assert "Input/output error" in again.append([outline(OTHER)]).failure
    assert again.append([outline(OTHER)]).requests == 1
    assert [len(numbers) for numbers in ids(path)] == [2, 2]


def test_a_line_torn_by_a_kill_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    RecordingFile(path, 1 << 20).append([outline(ONE)])
    with path.open("a") as file:
        file.write('{"timestamp": 12' + "3" * 70_000)
    RecordingFile(path, 1 << 20).append([outline(OTHER)])
    assert [len(numbers) for numbers in ids(path)] == [2, 2]


def test_a_full_file_takes_no_more_until_it_is_moved(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    file = RecordingFile(path, 250)
    written = file.append([outline(ONE)] * 5)
    assert (written.requests, written.full) == (2, True)
    assert path.stat().st_size == written.size <= 250
    assert file.append([outline(ONE)]).requests == 0
    path.rename(tmp_path / "old.jsonl")
    again = file.append([outline(ONE)])
    assert (again.requests, again.full) == (1, False)
    assert ids(path) == [[0, 1]]


def test_a_directory_that_goes_and_comes_back_is_survived(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    file = RecordingFile(folder / "r.jsonl", 1 << 20)
    assert file.append([outline(ONE)]).failure
    folder.mkdir()
    assert file.append([outline(ONE)]).requests == 1


def test_blocks_that_were_not_used_for_long_are_dropped() -> None:
    numbering = BlockIds(first=10, most=2)
    assert [numbering.of(outline([block] * WIDTH)) for block in (1, 2, 1, 3, 1, 2)] == [
        [10],
        [11],
        [10],
        [12],
        [10],
        [13],
    ]
    assert len(numbering) == 2


class Recording:
    """A recorder, and what its metrics say."""

    def __init__(self, path: Path, max_bytes: int = 1 << 20) -> None:
        self.registry = CollectorRegistry()
        self.recorder = Recorder(RecordingFile(path, max_bytes), self.registry)

    def count(self, outcome: str) -> float:
        return self.registry.get_sample_value("kvrouter_frontend_recorded_requests_total", {"outcome": outcome}) or 0.0


async def test_pending_records_are_written_when_it_stops(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    recorded = Recording(path)
    async with asyncio.TaskGroup() as group:
        group.create_task(recorded.recorder.run())
        for _ in range(50):
            recorded.recorder.note(outline(ONE))
        recorded.recorder.stop()
    assert len(read(path)) == recorded.count("written") == 50
    assert recorded.registry.get_sample_value("kvrouter_frontend_recording_bytes") == path.stat().st_size


async def test_a_disk_that_does_not_keep_up_costs_records_and_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_QUEUED_REQUESTS", 5)
    monkeypatch.setattr(recording, "MAX_QUEUED_BLOCKS", 6)
    recorded = Recording(tmp_path / "r.jsonl")
    for _ in range(9):
        recorded.recorder.note(outline(ONE))
    assert recorded.count("queue_full") == 6
    for _ in range(9):
        recorded.recorder.note(outline([1]))
    assert recorded.count("queue_full") == 6 + 7


async def test_failures_and_a_full_file_are_counted(tmp_path: Path) -> None:
    for path, max_bytes, outcome in (
        (tmp_path / "no" / "r.jsonl", 1 << 20, "failed"),
        (tmp_path / "r", 150, "file_full"),
    ):
        recorded = Recording(path, max_bytes)
        for _ in range(3):
            recorded.recorder.note(outline(ONE))
        recorded.recorder.stop()
        await recorded.recorder.run()
        assert recorded.count("written") + recorded.count(outcome) == 3
        assert recorded.count(outcome) >= 2
