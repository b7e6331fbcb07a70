"""What a request needs to continue on another worker."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, strategies as st
from kvrouter.frontend.generate_request import GenerateRequest, Sampling, StopRules
from kvrouter.frontend.packed_prompt import hash_prompt
from kvrouter.frontend.request.attempt_budget import AttemptBudget, is_inexact, migration_blocker
from kvrouter.frontend.request.progress import KeptOutput
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.v1.common_pb2 import BlockScope, MultimodalHash
from kvrouter.v1.worker_pb2 import ChoiceOutput, SamplingOptions, StopConditions, StructuredOutput

LOST = WorkerFailure(1, "UNAVAILABLE", "worker 1 failed")
SILENT = WorkerFailure(1, "silent", "worker 1 stopped answering")
UNREACHED = WorkerFailure(1, "UNAVAILABLE", "worker 1 failed", not_taken=True)


@pytest.mark.parametrize("pieces", [0, 1, 511, 512, 513, 3000])
def test_the_tokens_of_all_pieces_are_kept_in_order(pieces: int) -> None:
    kept = KeptOutput()
    for number in range(pieces):
        kept.pieces.append((number, number + 1))
        if number % 16 == 0:
            kept.compact()
    expected = [token for number in range(pieces) for token in (number, number + 1)]
    assert kept.packed() == kept.packed() == struct.pack(f"<{len(expected)}I", *expected)


@given(
    prompt=st.lists(st.integers(0, 1000), max_size=100),
    output=st.lists(st.integers(0, 1000), max_size=100),
    block_size=st.sampled_from([1, 4, 16]),
    content=st.lists(st.integers(0, 60), max_size=3),
)
def test_the_hashes_of_a_continuation_are_those_of_its_whole_prompt(
    prompt: list[int], output: list[int], block_size: int, content: list[int]
) -> None:
    request = GenerateRequest(
        model="m",
        stop=StopRules(1),
        scope=BlockScope(cache_salt="s"),
        multimodal_hashes=[MultimodalHash(block_index=index, hash=index + 9) for index in sorted(content)],
    )
    packed = struct.pack(f"<{len(prompt)}I", *prompt)
    whole = packed + struct.pack(f"<{len(output)}I", *output)
    known = hash_prompt(packed, request, block_size)
    assert hash_prompt(whole, request, block_size, known=known) == hash_prompt(whole, request, block_size)


def test_limits_are_those_of_the_rest() -> None:
    stop = StopRules(max_tokens=10, min_tokens=4, stop_token_ids=[7], ignore_eos=True)
    assert stop.after(3) == StopRules(max_tokens=7, min_tokens=1, stop_token_ids=[7], ignore_eos=True)
    assert stop.after(9) == StopRules(max_tokens=1, stop_token_ids=[7], ignore_eos=True)


@pytest.mark.parametrize(
    "stop",
    [
        StopConditions(max_tokens=10),
        StopConditions(max_tokens=10, min_tokens=4, stop_token_ids=[7, 8], ignore_eos=True),
    ],
)
def test_a_worker_gets_the_stop_conditions_of_its_request(stop: StopConditions) -> None:
    written = StopConditions()
    StopRules.of(stop).write(written)
    assert written == stop


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(),
        SamplingOptions(temperature=0, top_p=0.5, top_k=0, min_p=0, seed=0, n=1),
        SamplingOptions(frequency_penalty=0, presence_penalty=-1, repetition_penalty=1, logprobs=2),
        SamplingOptions(engine_options_json="{}", structured_output=StructuredOutput(json_object=True)),
        SamplingOptions(structured_output=StructuredOutput(choice=ChoiceOutput(texts=["a"]))),
    ],
)
def test_a_worker_gets_the_sampling_options_of_its_request(sampling: SamplingOptions) -> None:
    written = SamplingOptions()
    Sampling.of(sampling).write(written)
    assert written == sampling


def test_every_field_of_the_contract_reaches_a_worker() -> None:
    assert set(Sampling.__struct_fields__) == set(SamplingOptions.DESCRIPTOR.fields_by_name)
    assert set(StopRules.__struct_fields__) == set(StopConditions.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("sampling", "inexact"),
    [
        (Sampling(), False),
        (Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1), False),
        (Sampling(seed=0), True),
        (Sampling(presence_penalty=0.1), True),
        (Sampling(frequency_penalty=-0.1), True),
        (Sampling(repetition_penalty=1.1), True),
    ],
)
def test_seeds_and_penalties_make_a_continuation_inexact(sampling: Sampling, inexact: bool) -> None:
    assert is_inexact(sampling) == inexact


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"n": 1}, ""),
        ({"n": 2}, "it has 2 sequences"),
        ({"engine_options_json": '{"top_a": 1}'}, ""),
        ({"engine_options_json": "[1]"}, ""),
        ({"engine_options_json": "{"}, "its engine options cannot be read"),
        ({"engine_options_json": '{"regex": "a", "guided_json": {}}'}, "its output is structured (guided_json, regex)"),
    ],
)
def test_what_cannot_continue_says_why(options: dict[str, object], why: str) -> None:
    assert migration_blocker(Sampling(**options)) == why  # type: ignore[arg-type]


def test_attempts_begin_anew_after_each_migration() -> None:
    budget = AttemptBudget(max_attempts=2, migration_limit=2, pinned=False)
    for migrations in (0, 1):
        assert budget.migrations == migrations
        assert budget.allows(with_output=False)
        budget.failed(LOST, with_output=False)
        assert not budget.allows(with_output=False)
        assert budget.allows(with_output=True)
        budget.failed(LOST, with_output=True)
    assert not budget.allows(with_output=True)
    assert budget.migration_refusal() == "it has migrated 2 times, its limit"


def test_drained_workers_cost_no_migration() -> None:
    budget = AttemptBudget(max_attempts=1, migration_limit=1, pinned=False)
    drained = WorkerFailure(1, "drained", "worker 1 is being drained")
    for _ in range(5):
        assert budget.allows_after(drained, with_output=True)
        budget.failed(drained, with_output=True)
    budget.failed(LOST, with_output=True)
    assert not budget.allows(with_output=True)
    assert budget.allows(with_output=True, is_drained=True)
    assert budget.migrations == 6


def test_repeated_returns_to_a_silent_worker_cost_one_attempt() -> None:
    budget = AttemptBudget(max_attempts=3, migration_limit=0, pinned=False)
    for _ in range(10):
        assert budget.allows(with_output=False)
        budget.failed(SILENT, with_output=False)
    assert budget.silent_worker_id == 1
    budget.failed(LOST, with_output=False)
    assert budget.silent_worker_id is None
    assert budget.migration_refusal() == "its migration limit is 0"


def test_workers_that_a_request_never_reached_cost_no_attempt_but_are_bounded() -> None:
    budget = AttemptBudget(max_attempts=2, migration_limit=0, pinned=False)
    for _ in range(16):
        assert budget.allows_after(UNREACHED, with_output=False)
        budget.failed(UNREACHED, with_output=False)
    assert budget.allows(with_output=False), "both attempts are left"
    budget.failed(UNREACHED, with_output=False)
    assert not budget.allows_after(UNREACHED, with_output=False)
    pinned = AttemptBudget(max_attempts=2, migration_limit=0, pinned=True)
    assert not pinned.allows_after(UNREACHED, with_output=False)


def test_a_pinned_request_has_one_attempt() -> None:
    budget = AttemptBudget(max_attempts=3, migration_limit=3, pinned=True)
    assert not budget.allows(with_output=False)
    assert not budget.allows(with_output=True)
