"""What a request of the OpenAI API asks of its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrouter.mocker.constrained.constraint import Constraint, parse_schema
from kvrouter.mocker.constrained.errors import Unsupported
from kvrouter.mocker.openai.bodies import GenerationBody
from kvrouter.mocker.serving.errors import ApiError
from kvrouter.mocker.serving.generations import Sampling


def sampling(body: GenerationBody, prompt_tokens: int, limit: int) -> Sampling:
    """Returns what is asked of the output of one prompt.

    Args:
        body: The request.
        prompt_tokens: Length of the prompt.
        limit: Maximum length of prompt and output, in tokens.

    Raises:
        ApiError: prompt and output exceed the limit, or a number is out of range.
    """
    requested = body.output_tokens()
    if requested is not None and requested < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {requested}.", param="max_tokens")
    if prompt_tokens + (requested or 1) > limit:
        raise ApiError(
            400,
            f"This model's maximum context length is {limit} tokens. However, you requested {requested or 1} output "
            f"tokens and your prompt contains {prompt_tokens} input tokens. Please reduce the length of the input "
            "prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    return Sampling(
        max_tokens=limit - prompt_tokens if requested is None else requested,
        stop=body.stop_strings(),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        include_stop=body.include_stop_str_in_output or body.no_stop_trim,
        seed=body.seed,
        min_tokens=body.min_tokens or 0,
        ignore_eos=body.ignore_eos,
        greedy=body.temperature == 0,
        constraint=_constraint(body),
    )


def _constraint(body: GenerationBody) -> Constraint | None:
    if (tool := body.called_tool()) is not None:
        return Constraint(schema=tool.get("parameters") or {"type": "object"})
    kind = (body.response_format or {}).get("type")
    if kind == "json_object":
        return Constraint()
    if kind == "json_schema":
        return Constraint(schema=(body.response_format or {}).get("json_schema", {}).get("schema"))
    return constraint_of(body.structured_outputs or {"json": body.json_schema, "regex": body.regex})


def constraint_of(options: Mapping[str, Any]) -> Constraint | None:
    """Returns the constraint that options with the names of vLLM's ``structured_outputs`` ask for; None for none.

    Raises:
        ApiError: it is of a kind that the simulated engine does not know, or its schema is not JSON.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return None
    try:
        match next(iter(given.items())):
            case "json", value:
                return Constraint(schema=parse_schema(value) if isinstance(value, str) else value)
            case "regex", value:
                return Constraint(regex=value)
            case "choice", value:
                return Constraint(choice=value)
            case "json_object", _:
                return Constraint()
            case name, _:
                raise Unsupported(f"the simulated engine does not know {name}")
    except Unsupported as error:
        raise ApiError(400, str(error), param="structured_outputs") from None
