"""Media in simulated prompts: tokens of their own within the engine, placeholders with ids in its KV events.

Within the engine the tokens of a medium name it, so blocks with different media differ. In events, images have the ids
that vLLM computes. It computes those of other media from their decoded content: these have ids of the mocker's own.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping

import msgspec
from kvrouter.engines.media import Medium, MediumKind, VllmImageId, read_image_header, read_medium
from kvrouter.mocker.openai.bodies import ChatBody

PLACEHOLDERS: Mapping[MediumKind, int] = {"image": 256, "audio": 257, "video": 258}
"""Token that stands for a medium in the template and in events."""
OTHER_TOKENS = 40
"""Tokens of a medium that is no image with a known size."""
_FIRST = 1 << 31
_PIXELS_PER_TOKEN = 4


class SimulatedMedia:
    """The media of all prompts of a server, kept while it runs."""

    def __init__(self, model: str) -> None:
        """Starts without media. ``model`` is the model as the server was started with it."""
        self._model = model
        self._numbers: dict[str, int] = {}
        self._media: list[tuple[str, int]] = []
        """Id and placeholder of each."""

    def written(self, body: ChatBody) -> ChatBody:
        """Writes the tokens of a chat's media into its messages, as words of the tokenizer. Returns the chat."""
        for message in body.messages:
            for part in message.content if isinstance(message.content, list) else ():
                if (medium := read_medium(msgspec.to_builtins(part))) is not None:
                    part.text = "".join(f" t{token}" for token in self._tokens(medium))
        return body

    def shown(self, tokens: memoryview, block_size: int) -> tuple[array[int] | memoryview, list[tuple[int, str]]]:
        """Returns the tokens of blocks as events show them, and the index of the block in which each medium starts."""
        if not self._media:
            return tokens, []
        shown, starts = array("I", tokens), []
        for position, token in enumerate(tokens):
            if token >= _FIRST:
                medium_id, shown[position] = self._media[(token - _FIRST) // 2]
                if token % 2 == 0:
                    starts.append((position // block_size, medium_id))
        return shown, starts

    def _tokens(self, medium: Medium) -> list[int]:
        """Returns the tokens of a medium: an even number, then an odd one for each further token."""
        medium_id, length = _identified(medium, self._model)
        number = self._numbers.setdefault(medium_id, len(self._media))
        if number == len(self._media):
            self._media.append((medium_id, PLACEHOLDERS[medium.kind]))
        return [_FIRST + 2 * number, *[_FIRST + 2 * number + 1] * (length - 1)]


def _identified(medium: Medium, model: str) -> tuple[str, int]:
    if medium.kind == "image" and medium.base64:
        content = msgspec.convert(medium.base64, bytes)
        header = read_image_header(content)
        if header is not None:
            image_id = VllmImageId(model, header, len(content))
            image_id.update(content)
            return medium.uuid or image_id.hexdigest(), 1 + header.width * header.height // _PIXELS_PER_TOKEN
    decoded = hashlib.sha256(f"decoded {medium}".encode()).hexdigest()
    return medium.uuid or decoded, OTHER_TOKENS
