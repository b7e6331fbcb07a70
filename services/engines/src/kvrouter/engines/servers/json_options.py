"""Parts of a request that are JSON for the engine, and what no engine can serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from kvrouter.engines.fields import ENGINES, EngineName
from kvrouter.publisher.errors import RequestRefused
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.worker_pb2 import SamplingOptions, StructuredOutput, WorkerServiceGenerateRequest

_STRUCTURED = "sampling_options.structured_output"
_FIELD = "sampling_options.engine_options_json"


def engine_options(options: SamplingOptions, engine: EngineName) -> dict[str, Any]:
    """Returns the options of a request that only the engine interprets.

    Raises:
        RequestRefused: they are no JSON object, or have one that the sidecar sets.
    """
    if not options.engine_options_json:
        return {}
    try:
        given = msgspec.json.decode(options.engine_options_json, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestRefused(f"expected a JSON object: {error}", field=_FIELD) from None
    refused = sorted(given.keys() & ENGINES[engine].set_by_worker)
    if refused:
        raise RequestRefused(
            f"expected options of sampling, received {', '.join(refused)}, which the worker sets itself", field=_FIELD
        )
    return given


def json_schema(constraint: StructuredOutput) -> object:
    """Returns the JSON schema of a constraint.

    Raises:
        RequestRefused: it is not JSON.
    """
    try:
        return msgspec.json.decode(constraint.json_schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestRefused(f"expected a JSON schema: {error}", field=f"{_STRUCTURED}.json_schema") from None


def no_constraint() -> RequestRefused:
    """Returns the error for a structured output without a constraint, or with a newer one."""
    return RequestRefused("expected a constraint that the sidecar knows, received none", field=_STRUCTURED)


def transfer_parameters(request: WorkerServiceGenerateRequest, transfer_format: str) -> dict[str, Any]:
    """Returns the transfer parameters of a request that has some.

    Raises:
        RequestRefused: they have another format, or are no JSON object.
    """
    given = request.transfer_params
    if given.format != transfer_format:
        raise RequestRefused(
            f"expected transfer parameters in the format {transfer_format!r}, received {given.format!r:.64}",
            field="transfer_params.format",
            known=[transfer_format],
        )
    try:
        return msgspec.json.decode(given.payload, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestRefused(f"expected a JSON object: {error}", field="transfer_params.payload") from None


def sampling(
    request: WorkerServiceGenerateRequest, names: Iterable[str], *, max_tokens: str, min_tokens: str
) -> dict[str, Any]:
    """Returns the sampling parameters and stop conditions that vLLM and SGLang have in common.

    Args:
        request: The request. A prefill has one token of output.
        names: Options that the engine calls as the contract does.
        max_tokens: The engine's name of the most tokens of output.
        min_tokens: The engine's name of the fewest.

    Raises:
        RequestRefused: it wants several sequences. A worker ends its output at the end of the first one.
    """
    options, stop = request.sampling_options, request.stop_conditions
    if "n" in options and options.n != 1:
        raise RequestRefused(f"expected one sequence, received n={options.n}", field="sampling_options.n")
    parameters: dict[str, Any] = {name: getattr(options, name) for name in names if name in options}
    if "top_k" in options:
        parameters["top_k"] = options.top_k or -1
    parameters[max_tokens] = 1 if request.stage == Stage.STAGE_PREFILL else stop.max_tokens
    if stop.min_tokens:
        parameters[min_tokens] = min(stop.min_tokens, parameters[max_tokens])
    if stop.stop_token_ids:
        parameters["stop_token_ids"] = list(stop.stop_token_ids)
    if stop.ignore_eos:
        parameters["ignore_eos"] = True
    if stop.stop:
        parameters["stop"] = list(stop.stop)
    return parameters
