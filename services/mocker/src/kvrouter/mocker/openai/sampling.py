"""What a request of the OpenAI API asks of its output."""

from __future__ import annotations

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
    )
