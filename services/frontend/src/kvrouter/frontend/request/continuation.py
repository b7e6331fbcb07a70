"""Decides whether a request with output continues on another worker, and with which input."""

from __future__ import annotations

import json

from kvrouter.v1.worker_pb2 import SamplingOptions, StopConditions

_STRUCTURED = frozenset(
    {
        *("structured_outputs", "guided_decoding", "response_format", "json_schema", "regex", "ebnf", "structural_tag"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
)
"""Options of engines for structured output. Its grammar begins anew on another worker, in the middle of the output."""


def migration_blocker(sampling: SamplingOptions) -> str:
    """Returns why a request with output cannot continue on another worker; empty if it can."""
    if sampling.n > 1:
        return f"it has {sampling.n} sequences"
    if sampling.HasField("structured_output"):
        return "its output is structured"
    if not sampling.engine_options_json:
        return ""
    try:
        options = json.loads(sampling.engine_options_json)
    except (ValueError, RecursionError):
        return "its engine options cannot be read"
    used = sorted(_STRUCTURED & options.keys()) if isinstance(options, dict) else []
    return f"its output is structured ({', '.join(used)})" if used else ""


def is_inexact(sampling: SamplingOptions) -> bool:
    """Returns whether the output of another worker may differ: the state of a seed or a penalty begins anew."""
    return (
        sampling.HasField("seed")
        or bool(sampling.frequency_penalty or sampling.presence_penalty)
        or (sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1)
    )


def remaining(stop: StopConditions, output_tokens: int) -> StopConditions:
    """Returns the stop conditions of the rest of the output."""
    rest = StopConditions()
    rest.CopyFrom(stop)
    rest.max_tokens = max(0, stop.max_tokens - output_tokens)
    rest.min_tokens = max(0, stop.min_tokens - output_tokens)
    return rest
