"""Where an output ends: by itself, at its maximum, at a stop token, or after an output that is given."""

from __future__ import annotations

from itertools import count
from statistics import mean
from typing import Any

import pytest
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.reference import Engine
from kvrouter.mocker.engine.sequence import output_end
from kvrouter.mocker.engine.types import EngineRequest, FinishReason, pack_tokens

from .engine_harness import request

MEAN = 20.0
CONFIG = EngineConfig(mean_output_tokens=MEAN)
PROMPT = list(range(40))


def ended(config: EngineConfig = CONFIG, **fields: Any) -> tuple[list[int], FinishReason | None]:
    """Returns the output of one request and why it ended."""
    asked = {"request_id": "r", "prompt": pack_tokens(PROMPT), "max_tokens": 10_000} | fields
    engine = Engine(config)
    engine.submit(EngineRequest(**asked), 0.0)
    tokens: list[int] = []
    for now in count():
        engine.begin_step(float(now))
        (output,) = engine.end_step(float(now))
        tokens += output.token_ids
        if output.finish_reason is not None:
            return tokens, output.finish_reason
    raise AssertionError


def test_outputs_end_by_themselves_after_the_mean_length() -> None:
    ends = [output_end(request(str(number), PROMPT, 100_000), CONFIG) or 0 for number in range(4000)]
    assert abs(mean(ends) - MEAN) < 1.5
    assert min(ends) == 1
    assert max(ends) > 5 * MEAN


def test_an_output_ends_at_its_drawn_length_or_at_its_maximum() -> None:
    end = output_end(request("r", PROMPT, 10_000), CONFIG)
    assert end is not None
    tokens, reason = ended()
    assert (len(tokens), reason) == (end, FinishReason.STOP)
    assert ended() == (tokens, reason), "equal requests have equal outputs"
    if end > 1:
        assert ended(max_tokens=end - 1) == (tokens[:-1], FinishReason.LENGTH)


@pytest.mark.parametrize("seed", range(5))
def test_a_request_that_continues_elsewhere_ends_where_it_would_have_ended(seed: int) -> None:
    tokens, _ = ended(seed=seed)
    half = len(tokens) // 2
    rest, reason = ended(seed=seed, prompt=pack_tokens(PROMPT + tokens[:half]))
    assert (tokens[:half] + rest, reason) == (tokens, FinishReason.STOP)


def test_a_request_may_ignore_the_end_or_put_it_off() -> None:
    assert [(len(tokens), reason) for tokens, reason in [ended(ignore_eos=True, max_tokens=500)]] == [
        (500, FinishReason.LENGTH)
    ]
    for minimum in (1, 100, 500):
        tokens, reason = ended(min_tokens=minimum)
        assert len(tokens) >= minimum
        assert reason is FinishReason.STOP
    assert ended(EngineConfig(), max_tokens=500)[1] is FinishReason.LENGTH, "no end is drawn without a mean"


def test_a_stop_token_does_not_end_an_output_before_its_minimum() -> None:
    config = EngineConfig(vocabulary_size=2)
    stop = frozenset({0, 1})
    assert len(ended(config, stop_token_ids=stop)[0]) == 1
    assert len(ended(config, stop_token_ids=stop, min_tokens=7)[0]) == 7


@pytest.mark.parametrize("length", [1, 7, 40])
def test_an_output_that_is_given_is_the_output(length: int) -> None:
    given = tuple(range(1000, 1000 + length))
    assert ended(output=given) == (list(given), FinishReason.STOP)
    assert ended(output=given, ignore_eos=True, max_tokens=3) == (
        list(given[:3]),
        FinishReason.STOP if length <= 3 else FinishReason.LENGTH,
    )
