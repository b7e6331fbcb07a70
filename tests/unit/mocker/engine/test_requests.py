"""A request's life in the engine: what is refused, what comes out, how it ends."""

from __future__ import annotations

import pytest
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.types import DuplicateRequest, EngineRequest, PromptTooLong, QueueFull

from .engine_harness import Drive, check_blocks, engine, request


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 0},
        {"block_size": 0},
        {"max_batched_tokens": 8, "max_sequences": 9},
        {"max_sequences": 0},
        {"max_waiting": 0},
        {"num_blocks": 1, "block_size": 1},
        {"num_blocks": 2, "block_size": 4, "max_model_tokens": 9},
        {"max_model_tokens": 1},
        {"speed": 0.0},
        {"speed": float("nan")},
        {"vocabulary_size": 0},
        {"hash_seed": -1},
    ],
)
def test_an_impossible_engine_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"expected|cache"):
        EngineConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("prompt", "max_tokens"), [(b"", 1), (b"abc", 1), (b"abcd", 0)])
def test_an_impossible_request_is_refused(prompt: bytes, max_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"prompt|max_tokens"):
        EngineRequest("a", prompt, max_tokens)


def test_a_prompt_that_leaves_no_room_for_output_is_refused() -> None:
    drive = Drive(engine())
    with pytest.raises(PromptTooLong):
        drive.submit("a", range(40))
    assert drive.engine.begin_step(0.0) is None
    assert len(drive.run("a", range(39), 5)) == 1, "one token short of the cache, and it ends there"


def test_output_ends_at_the_longest_sequence() -> None:
    drive = Drive(engine(max_model_tokens=20))
    with pytest.raises(PromptTooLong):
        drive.submit("a", range(20))
    outputs = drive.run("a", range(15), 100)
    assert len(outputs) == 5
    assert outputs[-1].finish_reason == "length"


def test_an_id_is_used_once_at_a_time() -> None:
    drive = Drive(engine())
    drive.submit("a", range(3))
    with pytest.raises(DuplicateRequest):
        drive.submit("a", range(3))
    drive.drain()
    drive.submit("a", range(3))


def test_a_full_queue_refuses() -> None:
    drive = Drive(engine(max_waiting=2))
    drive.submit("a", range(3))
    drive.engine.check(request("b", range(3)))
    with pytest.raises(QueueFull):
        drive.engine.check(request("b", range(3)), waiting=1)
    drive.submit("b", range(3))
    with pytest.raises(QueueFull):
        drive.submit("c", range(3))


def test_output_repeats_by_request_id_or_seed() -> None:
    def tokens(request_id: str, seed: int | None = None) -> list[tuple[int, ...]]:
        return [o.token_ids for o in Drive(engine()).run(request_id, range(6), 12, seed=seed)]

    assert tokens("a") == tokens("a")
    assert tokens("a") != tokens("b")
    assert tokens("a", 7) == tokens("b", 7)
    assert tokens("a", 7) != tokens("a", 8)


def test_output_stays_in_the_vocabulary() -> None:
    outputs = Drive(engine(vocabulary_size=3)).run("a", range(6), 30)
    assert {t for o in outputs for t in o.token_ids} == {0, 1, 2}


def test_a_stop_token_ends_the_output_and_is_part_of_it() -> None:
    drawn = [o.token_ids[0] for o in Drive(engine()).run("a", range(6), 12)]
    outputs = Drive(engine()).run("a", range(6), 12, stop_token_ids=frozenset({drawn[4]}))
    assert [o.token_ids[0] for o in outputs] == drawn[:5]
    assert [o.finish_reason for o in outputs] == [None] * 4 + ["stop"]


def test_abort_ends_a_request_wherever_it_is() -> None:
    drive = Drive(engine(num_blocks=40))
    drive.submit("decodes", range(6), 9)
    drive.step()
    drive.submit("prefills", range(100, 130), 9)
    drive.submit("waits", range(200, 206), 9)
    drive.begin()
    for name in ("decodes", "prefills", "waits"):
        final = drive.engine.abort(name)
        assert final is not None
        assert (final.finish_reason, final.token_ids) == ("abort", ())
        check_blocks(drive.engine)
        assert drive.engine.abort(name) is None
    assert drive.end() == []
    assert drive.engine.begin_step(drive.now) is None
    assert drive.engine.load().active_blocks == 0


def test_abort_of_a_prefill_about_to_complete_gives_no_token() -> None:
    drive = Drive(engine())
    drive.submit("a", range(6), 9)
    drive.begin()
    drive.engine.abort("a")
    assert drive.end() == []
    assert drive.engine.load().running == 0


def test_an_aborted_request_leaves_its_computed_blocks_cached() -> None:
    drive = Drive(engine())
    drive.submit("a", range(20), 9)
    drive.step()
    drive.engine.abort("a")
    assert drive.run("b", range(20))[0].cached_tokens == 16


def test_load_counts_requests_blocks_and_tokens_to_compute() -> None:
    drive = Drive(engine(num_blocks=20))
    drive.run("a", range(10))
    drive.submit("b", range(100, 130))
    drive.submit("c", range(200, 207))
    drive.step()
    load = drive.engine.load()
    assert (load.running, load.waiting, load.prefill_tokens) == (1, 1, 14 + 7)
    assert (load.active_blocks, load.cached_blocks, load.total_blocks) == (4, 2, 20)


@pytest.mark.parametrize("seed", [None, 7])
def test_a_request_that_continues_on_another_engine_has_the_output_of_one_that_was_not_interrupted(
    seed: int | None,
) -> None:
    whole = [token for o in Drive(engine()).run("a", range(6), 12, seed=seed) for token in o.token_ids]
    continued = Drive(engine()).run("a", [*range(6), *whole[:5]], 7, seed=seed)
    assert [token for o in continued for token in o.token_ids] == whole[5:]
