"""Runs the sequences of a request and sends their output."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

from aiohttp import web
from kvrouter.mocker.openai.bodies import GenerationBody
from kvrouter.mocker.openai.responses import Responses
from kvrouter.mocker.serving.errors import refusals
from kvrouter.mocker.serving.generations import Generations
from kvrouter.mocker.serving.http_responses import json_response, open_stream

Complete = Callable[[dict[str, Any], Generations], dict[str, Any]]
"""Adds to a whole response what only one of the engines has."""


async def whole(generations: Generations, responses: Responses, complete: Complete) -> web.Response:
    """Returns all output as one response.

    Raises:
        ApiError: the engine refuses the request.
    """
    with closing(generations):
        with refusals():
            generations.start()
        async for index, piece in generations.pieces():
            responses.add(index, piece)
    return json_response(complete(responses.whole(), generations))


async def streamed(request: web.Request, generations: Generations, responses: Responses) -> web.StreamResponse:
    """Sends the output as server-sent events while it is generated.

    Raises:
        ApiError: the engine refuses the request.
    """
    with closing(generations):
        with refusals():
            generations.start()
        stream = await open_stream(request)
        async for index, piece in generations.pieces():
            for chunk in responses.chunks(index, piece):
                await stream.write(responses.encoded(chunk))
    if (last := responses.last_chunk()) is not None:
        await stream.write(responses.encoded(last))
    await stream.write(responses.ends_with)
    return stream


def tokenized(body: GenerationBody) -> web.Response:
    """Returns the token ids of a prompt."""
    (tokens,) = body.prompts()
    return json_response({"count": len(tokens), "tokens": tokens})
