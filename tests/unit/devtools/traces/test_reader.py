from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from kvrouter.devtools.traces.reader import (
    PIECE_TOKENS,
    TraceError,
    TraceRequest,
    piece_tokens,
    read_shipped_trace,
    read_trace,
)


def line(
    timestamp: object = 0,
    input_length: object = 600,
    output_length: object = 3,
    hash_ids: object = (1, 2),
    **more: object,
) -> str:
    fields = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length}
    return json.dumps(fields | {"hash_ids": hash_ids} | more)


def test_prompts_share_exactly_the_tokens_of_shared_pieces() -> None:
    first = TraceRequest(0, 0.0, 1100, 1, (7, 8, 9)).tokens()
    second = TraceRequest(1, 0.0, 1300, 1, (7, 8, 10)).tokens()
    assert len(first) == 1100
    assert first[: 2 * PIECE_TOKENS] == second[: 2 * PIECE_TOKENS]
    assert first[2 * PIECE_TOKENS : 1100] != second[2 * PIECE_TOKENS : 1100]


@given(st.integers(min_value=0, max_value=1 << 40))
def test_a_piece_is_512_tokens_of_a_16_bit_vocabulary(piece: int) -> None:
    tokens = piece_tokens(piece)
    assert len(tokens) == PIECE_TOKENS
    assert max(tokens) < 1 << 16
    assert tokens != piece_tokens(piece + 1)


FIRST_TOKENS_OF_PIECE_0 = [36450, 53113, 18553, 7373]


def test_the_expansion_is_the_same_everywhere() -> None:
    # Fixed by the formula in the docstring, so that replays on other machines send the same prompts.
    assert list(piece_tokens(0)[:4]) == FIRST_TOKENS_OF_PIECE_0


def test_a_gzip_file_reads_like_a_plain_one(tmp_path: Path) -> None:
    text = line(1000) + "\n\n" + line(2500) + "\n"
    (tmp_path / "plain.jsonl").write_text(text)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    plain = read_trace(tmp_path / "plain.jsonl")
    assert plain == read_trace(tmp_path / "packed.jsonl.gz")
    assert [(request.index, request.arrival_ms) for request in plain] == [(0, 0.0), (1, 1500.0)]


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(line() + "\n" + "not JSON\n")
    assert len(read_trace(tmp_path / "trace.jsonl", limit=1)) == 1


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        (line(timestamp=None), "timestamp is None"),
        (line(timestamp=-1), "timestamp is -1"),
        (line(timestamp=10**400), "timestamp is 1000"),
        (line(timestamp=float("nan")), "timestamp is nan"),
        ("[" * 100_000, "is not JSON"),
        (line(timestamp=True), "timestamp is True"),
        (line(input_length=0), "input_length is 0"),
        (line(output_length="3"), "output_length is '3'"),
        (line(hash_ids=None), "hash_ids is"),
        (line(hash_ids=["a"]), "hash_ids is"),
        (line(input_length=1025), "stand for 1024 tokens"),
        (line(hash_ids=[-1, 2]), "hash_ids is"),
        (line(piece_tokens=0), "piece_tokens is 0"),
        (line(piece_tokens=1 << 17), "piece_tokens is 131072"),
        (line(model=3), "model is '3'"),
        (line(piece_tokens=16), "stand for 32 tokens"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, bad: str, words: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line(0) + "\n" + line(10) + "\n" + bad + "\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:3: ") as caught:
        read_trace(trace)
    assert words in str(caught.value)


def test_requests_come_in_order_of_time_whatever_the_order_of_lines(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("\n".join([line(70), line(20, 500), line(50)]))
    read = read_trace(tmp_path / "trace.jsonl")
    assert [(r.index, r.arrival_ms, r.input_length) for r in read] == [(0, 0.0, 500), (1, 30.0, 600), (2, 50.0, 600)]


def test_pieces_of_a_recording_are_as_long_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(
        "\n".join(line(0, 40, hash_ids=ids, piece_tokens=16) for ids in ([1, 2, 3], [1, 2, 4]))
    )
    first, second = (request.tokens() for request in read_trace(tmp_path / "trace.jsonl"))
    assert len(first) == len(second) == 40
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]


def test_of_a_recording_of_several_models_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_text("\n".join([line(5, model="a"), line(8, 500, model="b", piece_tokens=256), line(9, model="a")]))
    with pytest.raises(TraceError, match="models a, b: name one"):
        read_trace(path)
    assert [request.arrival_ms for request in read_trace(path, model="a")] == [0.0, 4.0]
    assert [request.input_length for request in read_trace(path, limit=1, model="b")] == [500]
    with pytest.raises(TraceError, match="no request of model c"):
        read_trace(path, model="c")


def test_pieces_of_two_sizes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(line() + "\n" + line(piece_tokens=300))
    with pytest.raises(TraceError, match="the same in every line"):
        read_trace(tmp_path / "trace.jsonl")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl.gz").write_bytes(gzip.compress(line().encode())[:-9])
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.jsonl", "empty.jsonl", "broken.jsonl.gz", "binary.jsonl"):
        with pytest.raises(TraceError, match=name):
            read_trace(tmp_path / name)


def test_the_shipped_part_is_the_start_of_the_real_trace() -> None:
    shipped = read_shipped_trace()
    assert len(shipped) == 2000
    assert shipped[-1].arrival_ms == 669_000
    assert sum(request.input_length for request in shipped) == 27_441_774
    whole = Path(__file__).parents[5] / "shared" / "traces" / "conversation_trace.jsonl"
    if not whole.exists():
        pytest.skip("../shared/traces is absent: only the shipped part is checked")
    assert shipped == read_trace(whole, limit=2000)
