"""Prepares requests that come over gRPC with a text, or whose output is returned as text."""

from __future__ import annotations

from kvrouter.frontend.edge.output_buffer import OutputBuffer
from kvrouter.frontend.edge.text_output import TextOutput
from kvrouter.frontend.edge.text_request import TextPrompt
from kvrouter.frontend.request.output_receiver import OutputReceiver
from kvrouter.frontend.request.served_models import ServedModels
from kvrouter.frontend.request.validation import Limits, prompt_limit
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest


async def with_text(
    models: ServedModels, limits: Limits, request: FrontendServiceGenerateRequest, prompt: bytes, buffer: OutputBuffer
) -> tuple[bytes, OutputReceiver]:
    """Returns the prompt, tokenized if it is a text, and the receiver that adds text to the output if requested.

    Raises:
        UnknownModel: no component serves the model.
        NoWorkers: the model has no live worker, so that nothing is known of its tokenizer.
        BadRequest: the model has no tokenizer here, or there are token ids beside a text.
        PromptTooLong: the text has too many tokens.
        RateLimited, Overloaded: too much text waits for the tokenizer.
    """
    field = "prompt_text" if request.prompt_text else "return_text"
    if request.prompt_text and prompt:
        raise BadRequest("prompt_text: there are token_ids too", field=field, advice="Send one of them.")
    text = models.text_of(request.model, field)
    if request.prompt_text:
        source = TextPrompt(request.prompt_text, add_special_tokens=True, field="prompt_text")
        with prompt_limit(models.pools(request.model, forwarding=False), limits) as limit:
            (prompt,) = await models.texts.tokens(text, [source], limit, salt=request.scope.cache_salt)
        request.ClearField("prompt_text")
    if not request.return_text:
        return prompt, buffer
    stop = list(request.stop_conditions.stop)
    request.stop_conditions.ClearField("stop")
    if not all(stop):
        raise BadRequest("a stop string is empty", field="stop_conditions.stop", advice="Leave it out.")
    minimum = request.stop_conditions.min_tokens
    return prompt, TextOutput(buffer, text.detokenizer(prompt), stop, min_tokens=minimum)
