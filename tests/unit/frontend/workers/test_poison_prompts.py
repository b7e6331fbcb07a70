"""Prompts that saw deaths of workers, by hand-written times."""

from __future__ import annotations

import pytest
from kvrouter.frontend.workers.failures import MAX_WATCHERS, WorkerFailure, WorkerFate
from kvrouter.frontend.workers.poison_prompts import MAX_ENTRIES, PoisonPrompts, RequestDeaths, prompt_key
from kvrouter.v1.errors import PoisonPrompt

KEY = bytes(16)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_prompt_is_refused_after_two_deaths_and_for_a_while() -> None:
    clock = Clock()
    prompts = PoisonPrompts(60, clock)
    prompts.note(KEY, "a 1")
    assert prompts.refused_seconds(KEY) == 0
    clock.now = 10
    prompts.note(KEY, "b 1")
    assert prompts.refused_seconds(KEY) == 60
    clock.now = 69
    assert prompts.refused_seconds(KEY) == 1
    clock.now = 70
    assert prompts.refused_seconds(KEY) == 0
    assert len(prompts) == 0


def test_a_worker_that_ran_the_prompt_many_times_is_one_death() -> None:
    prompts = PoisonPrompts(60)
    notified: list[str] = []
    prompts.on_death = lambda _, worker: notified.append(worker)
    for _ in range(5):
        prompts.note(KEY, "a 1")
    assert not prompts.learn(KEY, "a 1"), "another Frontend saw the same death"
    assert prompts.refused_seconds(KEY) == 0
    assert prompts.learn(KEY, "a 2"), "another process at the same address"
    assert prompts.refused_seconds(KEY) > 0
    assert notified == ["a 1"], "what others notified is not passed on"


def test_old_deaths_are_forgotten() -> None:
    clock = Clock()
    prompts = PoisonPrompts(60, clock)
    prompts.note(KEY, "a 1")
    clock.now = 60
    prompts.note(KEY, "b 1")
    assert prompts.refused_seconds(KEY) == 0


def test_the_number_of_prompts_is_bounded() -> None:
    prompts = PoisonPrompts(60, Clock())
    for number in range(MAX_ENTRIES + 5):
        for worker in "ab":
            prompts.note(number.to_bytes(16, "big"), worker)
    assert len(prompts) == MAX_ENTRIES
    assert prompts.refused_seconds((4).to_bytes(16, "big")) == 0
    assert prompts.refused_seconds((5).to_bytes(16, "big")) > 0


def test_zero_seconds_refuse_nothing() -> None:
    prompts = PoisonPrompts(0)
    prompts.note(KEY, "a 1")
    prompts.note(KEY, "b 1")
    assert prompts.refused_seconds(KEY) == 0


def test_a_key_tells_tenants_models_and_prompts_apart() -> None:
    parts = [("", "m", b"ab"), ("a", "m", b"ab"), ("", "ma", b"b"), ("m", "", b"ab"), ("", "m", b"abc")]
    assert len({prompt_key(*each) for each in parts}) == len(parts)


def lost(worker_id: int, *, died: bool = True, cause: str = "UNAVAILABLE") -> WorkerFailure:
    return WorkerFailure(worker_id, cause, "it is gone", fate=WorkerFate(f"{worker_id} 1", 0, died=died))


def test_a_request_ends_at_its_second_death_and_so_do_those_with_its_prompt() -> None:
    prompts = PoisonPrompts(60)
    first, second, other = (RequestDeaths(prompts, tenant, "m", b"1234") for tenant in ("t", "t", "u"))
    first.add(lost(1))
    first.check()
    assert first.next_is_last
    first.add(lost(2))
    with pytest.raises(PoisonPrompt, match="2 workers died while they ran the request"):
        first.check()
    with pytest.raises(PoisonPrompt, match="refused for 60 s more") as refused:
        second.check()
    assert not refused.value.info.HasField("retry_after_ms")
    other.check()


def test_a_drained_worker_is_no_death() -> None:
    deaths = RequestDeaths(PoisonPrompts(60), "", "m", b"1234")
    for number in range(5):
        deaths.add(WorkerFailure(number, "drained", "it is being drained"))
        deaths.check()


def test_a_request_does_not_leave_a_second_worker_that_hangs_while_the_first_may_die() -> None:
    prompts = PoisonPrompts(60)
    deaths = RequestDeaths(prompts, "", "m", b"1234")
    hung = lost(1, died=False, cause="silent")
    assert deaths.may_leave(1, "silent")
    deaths.add(hung)
    assert deaths.may_leave(1, "silent"), "it may return to the same worker and leave it again"
    assert not deaths.may_leave(2, "stalled")
    assert deaths.may_leave(2, "drained")
    assert hung.fate is not None
    hung.fate.resolve(died=False)
    assert deaths.may_leave(2, "silent")
    dies = lost(2, died=False, cause="silent")
    deaths.add(dies)
    assert dies.fate is not None
    dies.fate.resolve(died=True)
    assert deaths.count == len(prompts) == 1, "the death is known for the prompt too"
    assert not deaths.may_leave(3, "silent")


def test_those_that_wait_for_a_fate_are_bounded() -> None:
    fate = WorkerFate("a 1", 0)
    notified: list[str] = []
    for _ in range(MAX_WATCHERS + 1):
        fate.on_death(notified.append)
    assert fate.watchers == MAX_WATCHERS
    fate.resolve(died=True)
    fate.resolve(died=False)
    assert len(notified) == MAX_WATCHERS
    assert fate.died
