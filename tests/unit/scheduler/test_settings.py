"""The options of the documents, under their names and with their defaults."""

from __future__ import annotations

import pytest
from kvrouter.runtime.config.settings import load
from kvrouter.scheduler.load.booked_load import Accounting
from kvrouter.scheduler.overlap.predictions import PredictionLimits
from kvrouter.scheduler.request.options import RoutingOptions, Thresholds
from kvrouter.scheduler.settings import SchedulerSettings


def test_defaults_are_those_of_the_documents() -> None:
    settings = load(SchedulerSettings, [])
    assert settings.routing() == RoutingOptions("forecast", 1.0, 0.0, Thresholds(None, None))
    assert settings.accounting() == Accounting(True, True, True)
    assert settings.kv_events
    assert settings.prediction_limits() == PredictionLimits(120.0, 1 << 20, 0.99)
    assert settings.ignored_options() == []


def test_limits_of_predictions_have_an_effect_with_events_too() -> None:
    flags = ["--router-ttl", "30", "--router-max-tree-size", "100", "--router-prune-target-ratio", "0.5"]
    for mode in ([], ["--no-kv-events"]):
        settings = load(SchedulerSettings, [*mode, *flags])
        assert settings.ignored_options() == []
        assert settings.prediction_limits() == PredictionLimits(30.0, 100, 0.5)


def test_options_that_the_mode_does_not_use_are_named() -> None:
    weight, temperature = ["--overlap-score-weight", "2"], ["--router-temperature", "0.5"]
    assert load(SchedulerSettings, [*weight, *temperature]).ignored_options() == [weight[0], temperature[0]]
    assert load(SchedulerSettings, ["--router-mode", "kv", *weight, *temperature]).ignored_options() == []
    queue = ["--max-queued-requests", "5"]
    assert load(SchedulerSettings, queue).ignored_options() == []
    assert load(SchedulerSettings, ["--router-mode", "kv", *queue]).ignored_options() == queue[:1]


def test_only_a_mode_that_uses_the_weight_queries_no_indexer_at_weight_0() -> None:
    weightless = ["--overlap-score-weight", "0"]
    assert load(SchedulerSettings, weightless).routing().queries_indexer
    assert not load(SchedulerSettings, ["--router-mode", "kv", *weightless]).routing().queries_indexer


@pytest.mark.parametrize("decode", ["--active-decode-blocks-threshold", "--busy-threshold"])
@pytest.mark.parametrize("weight", ["--kv-overlap-score-weight", "--overlap-score-weight"])
def test_every_name_of_an_option_is_understood(decode: str, weight: str) -> None:
    flags = ["--router-mode", "round-robin", weight, "2.5", "--router-temperature", "0.5", decode, "0.85"]
    more = ["--active-prefill-tokens-threshold", "1000", "--no-track-active-blocks", "--no-assume-kv-reuse"]
    settings = load(SchedulerSettings, [*flags, *more, "--no-track-output-blocks"])
    assert settings.routing() == RoutingOptions("round-robin", 2.5, 0.5, Thresholds(0.85, 1000))
    assert settings.accounting() == Accounting(False, False, False)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--router-mode", "best"),
        ("--router-temperature", "-1"),
        ("--router-temperature", "inf"),
        ("--router-temperature", "nan"),
        ("--busy-threshold", "2"),
        ("--active-prefill-tokens-threshold", "-1"),
        ("--kv-overlap-score-weight", "-0.5"),
        ("--kv-overlap-score-weight", "nan"),
        ("--indexer-timeout-ms", "0"),
        ("--router-ttl", "0"),
        ("--router-max-tree-size", "0"),
        ("--router-prune-target-ratio", "1.1"),
        ("--session-grace-seconds", "-1"),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], flag: str, value: str) -> None:
    with pytest.raises(SystemExit) as ended:
        load(SchedulerSettings, [f"{flag}={value}"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flag in line
