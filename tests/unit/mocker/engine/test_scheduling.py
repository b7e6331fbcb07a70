"""How steps are put together, example by example. Engines have 10 blocks of 4 tokens and 16 tokens a step."""

from __future__ import annotations

import pytest
from kvrouter.mocker.engine.time_model import TimeModel

from .engine_harness import Drive, check_blocks, engine


def test_a_step_takes_prefill_and_decode_time_and_its_tokens_come_at_its_end() -> None:
    drive = Drive(engine())
    drive.submit("a", range(8), 5)
    drive.step()
    drive.submit("b", range(100, 110), 5)
    step, outputs = drive.step()
    assert (step.prefill_tokens, step.decode_sequences) == (10, 1)
    share = 9 / 40  # a's prompt and its first token
    prefill_ms = 4.209989e-07 * 100 + 1.518344e-02 * 10 + 16.50142
    decode_ms = -25.74 * share**2 + 54.01 * share + 5.74
    assert step.duration == pytest.approx((prefill_ms + decode_ms) / 1e3)
    assert [(o.request_id, len(o.token_ids), o.first_token) for o in outputs] == [("a", 1, False), ("b", 1, True)]
    assert drive.now == step.started_at + step.duration


def test_decode_time_counts_contexts_of_what_decodes_and_not_blocks() -> None:
    model = TimeModel(0, 0, 0, 0, 40, 0, 0)  # with 40 tokens of capacity: 1 ms per context token, prefill free
    drive = Drive(engine(time_model=model))
    drive.submit("a", range(9), 9)
    drive.submit("b", range(9), 9)  # shares two blocks with a, and its context counts all the same
    drive.step()
    drive.submit("c", range(100, 115), 9)  # its prefill is not part of any decode
    step, _ = drive.step()
    assert (step.prefill_tokens, step.decode_sequences) == (14, 2)
    assert step.duration == pytest.approx((10 + 10) / 1e3)
    assert drive.engine.load().active_blocks == 2 + 1 + 1 + 4


def test_the_first_token_comes_out_of_the_prefill_step_without_a_decode() -> None:
    drive = Drive(engine())
    drive.submit("a", range(8), 2)
    step, outputs = drive.step()
    assert (step.prefill_tokens, step.decode_sequences) == (8, 0)
    assert [(o.first_token, o.finish_reason) for o in outputs] == [(True, None)]
    step, outputs = drive.step()
    assert (step.prefill_tokens, step.decode_sequences) == (0, 1)
    assert [(o.first_token, o.finish_reason) for o in outputs] == [(False, "length")]


def test_decodes_take_the_budget_first_then_the_running_prefill_then_the_queue() -> None:
    drive = Drive(engine(num_blocks=30))
    drive.submit("a", range(4), 9)
    drive.submit("b", range(100, 104), 9)
    drive.step()
    drive.submit("c", range(200, 220), 9)
    drive.submit("d", range(300, 320), 9)
    step, _ = drive.step()  # 2 decodes, 14 of c's 20
    assert (step.prefill_tokens, step.decode_sequences) == (14, 2)
    assert drive.engine.load().waiting == 1
    step, outputs = drive.step()  # 2 decodes, c's last 6, d's first 8
    assert (step.prefill_tokens, step.decode_sequences) == (14, 2)
    assert [o.request_id for o in outputs if o.first_token] == ["c"]
    assert drive.engine.load().prefill_tokens == 12
    step, outputs = drive.step()  # 3 decodes, d's last 12
    assert (step.prefill_tokens, step.decode_sequences) == (12, 3)
    assert [o.request_id for o in outputs if o.first_token] == ["d"]


def test_a_head_without_room_holds_up_those_behind_it() -> None:
    drive = Drive(engine(max_batched_tokens=64))
    drive.submit("a", range(24), 3)  # 6 of 10 blocks
    drive.submit("b", range(100, 117))  # 5
    drive.submit("c", range(200, 204))  # 1
    drive.step()
    assert (drive.engine.load().running, drive.engine.load().waiting) == (1, 2)
    drive.step()
    drive.step()  # a ends
    _, outputs = drive.step()
    assert [o.request_id for o in outputs] == ["b", "c"]


def test_at_most_max_sequences_run() -> None:
    drive = Drive(engine(max_sequences=2))
    for name in "abc":
        drive.submit(name, range(2), 2)
    drive.begin()
    assert (drive.engine.load().running, drive.engine.load().waiting) == (2, 1)


def test_admission_counts_the_whole_prompt_less_cached_blocks_in_use() -> None:
    drive = Drive(engine(max_batched_tokens=64))
    drive.submit("a", range(28), 9)  # 7 blocks
    drive.step()
    drive.submit("b", [*range(28), *range(100, 109)])  # 10 blocks less 7 in use; a's decode leaves 2 free
    drive.step()
    assert drive.engine.load().waiting == 1
    drive.engine.abort("b")
    drive.submit("c", [*range(28), *range(100, 108)])  # 9 blocks, 7 in use, 2 free
    step, _ = drive.step()
    assert (step.prefill_tokens, drive.engine.load().waiting) == (8, 0)


def test_cached_blocks_that_nobody_uses_are_not_free_of_charge() -> None:
    drive = Drive(engine(max_batched_tokens=64))
    drive.run("a", range(16))  # leaves 4 idle blocks and 6 empty ones
    drive.submit("b", range(100, 120), 3)  # 5 blocks, and one for its output
    drive.step()
    drive.submit("c", range(20))  # 5 blocks: the 4 idle ones are all that is free, and will not do for a fifth
    step, _ = drive.step()
    assert (step.prefill_tokens, drive.engine.load().waiting) == (0, 1)
    drive.drain()
    assert drive.outputs[-1].cached_tokens == 16


def test_blocks_are_taken_chunk_by_chunk() -> None:
    drive = Drive(engine())
    drive.submit("a", range(36))
    used = []
    for _ in range(3):
        drive.begin()
        used.append(drive.engine.load().active_blocks)
        drive.end()
    assert used == [4, 8, 9]


def test_want_of_blocks_sends_the_newest_to_the_queues_head_and_admits_nobody() -> None:
    drive = Drive(engine(max_batched_tokens=64))
    drive.submit("a", range(20), 8)
    drive.submit("b", range(100, 120), 8)
    drive.step()
    drive.submit("c", range(200, 202))
    step, outputs = drive.step()  # both are at a block's edge and nothing is free: b goes, c is not let in
    assert (step.preempted, step.prefill_tokens, step.decode_sequences) == (1, 0, 1)
    assert [o.request_id for o in outputs] == ["a"]
    assert [s.request.request_id for s in drive.engine._waiting] == ["b", "c"]
    check_blocks(drive.engine)
    drive.drain()
    tokens = [o for o in drive.outputs if o.request_id == "b"]
    assert len(tokens) == 8
    assert [o.first_token for o in tokens] == [True] + [False] * 7
    assert {o.cached_tokens for o in tokens} == {0}, "what a request finds of itself is no reuse"
    assert sum(s.reused_tokens for s in drive.steps) > 0
    assert drive.finish_reasons() == {"a": "length", "b": "length", "c": "length"}


def test_a_preempted_request_goes_on_where_it_was() -> None:
    alone, crowded = Drive(engine(num_blocks=40)), Drive(engine(max_batched_tokens=64))
    alone.run("b", range(100, 120), 12)
    crowded.submit("a", range(20), 12)
    crowded.run("b", range(100, 120), 12)
    assert sum(s.preempted for s in crowded.steps) > 0
    assert [o.token_ids for o in crowded.outputs if o.request_id == "b"] == [o.token_ids for o in alone.outputs]


def test_a_prefill_that_finds_no_block_waits_again() -> None:
    drive = Drive(engine())
    drive.submit("a", range(8), 20)
    drive.step()
    drive.submit("b", range(100, 128))  # 7 blocks; 8 are free now, but a needs one of them
    drive.step()
    assert drive.engine._prefilling is not None
    drive.drain()
    assert drive.finish_reasons() == {"a": "length", "b": "length"}


def test_what_is_submitted_before_a_step_is_in_it_and_what_comes_later_is_not() -> None:
    drive = Drive(engine())
    for name in "abc":
        drive.submit(name, [ord(name)] * 3)
    drive.begin()
    drive.submit("d", [9] * 3)
    assert [o.request_id for o in drive.end()] == ["a", "b", "c"]
    assert [o.request_id for o in drive.step()[1]] == ["d"]


def test_outputs_say_when_the_request_came_and_ran() -> None:
    drive = Drive(engine(max_sequences=1))
    drive.submit("a", range(3), 2)
    drive.submit("b", range(3))
    drive.drain()
    assert {(o.request_id, o.submitted_at, o.scheduled_at) for o in drive.outputs} == {
        ("a", 0.0, 0.0),
        ("b", 0.0, drive.steps[2].started_at),
    }


def test_an_idle_engine_has_no_step() -> None:
    assert engine().begin_step(0.0) is None


def test_steps_do_not_nest() -> None:
    drive = Drive(engine())
    with pytest.raises(RuntimeError):
        drive.engine.end_step(0.0)
    drive.submit("a", range(3))
    drive.begin()
    with pytest.raises(RuntimeError):
        drive.engine.begin_step(0.0)


def test_nobody_is_admitted_in_a_step_that_preempts_even_if_there_is_room() -> None:
    drive = Drive(engine(num_blocks=4))
    drive.submit("a", range(8), 3)
    drive.submit("b", range(8), 3)  # computes the last block again, into a block of its own
    drive.step()
    step, _ = drive.step()  # b's block is free, and a's copy would do for it
    assert (step.preempted, step.decode_sequences, step.prefill_tokens) == (1, 1, 0)
    step, _ = drive.step()
    assert (step.preempted, step.decode_sequences, step.prefill_tokens, step.reused_tokens) == (0, 1, 1, 8)
