"""Images, sounds and videos of one prompt: the id of each, and the number of its tokens in the prompt.

Nothing is fetched or decoded. The id is that of the engine's KV events where it can be computed here, and otherwise a
digest of the content or URL. The number of tokens is learned from the engine: its response reports the length of the
prompt, and all tokens besides those of the text are the media's. Until then, a length is assumed that hardly any engine
goes below. The blocks from such a medium on match those of no engine, so the predicted overlap is too short, never too
long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from blake3 import blake3
from kvrouter.core import multimodal_hash
from kvrouter.engines.media import Medium, MediumKind, VllmImageId, read_image_header, read_medium
from kvrouter.frontend.text.client_work import Slices
from kvrouter.v1.common_pb2 import MultimodalHash
from kvrouter.v1.errors import BadRequest, PromptTooLong

MAX_MEDIA = 1024
"""Maximum number of media of a prompt that is tokenized; engines take fewer."""
MAX_LENGTHS = 4096
"""Maximum number of media and sizes of images of a model whose lengths are known."""
ASSUMED_TOKENS = 256
"""Tokens of a medium whose length is unknown."""
_PIXELS_PER_TOKEN = 1024
"""Pixels of an image for each of its tokens, at least: models with tokens for patches have 784 or 1,024."""
_TOKEN_BYTES = 4
_SIZE_BYTES = 16
_PIECE = 64 << 10
"""Characters of base64 that are decoded at once, a multiple of 4: 50 us."""
_PIECES_OF_SLICE = 16
_SLICE = _PIECES_OF_SLICE * _PIECE
_MEDIUM_WORK = 16 << 10
"""Work of a medium besides its content, as characters of it."""
_HEAD_PIECES = 4
"""Pieces in which the header of an image is looked for: photographs have up to 128 KiB of other data before it."""


class MediaLengths:
    """Numbers of tokens engines make of media, by digests of what determines them. Any thread may read them."""

    def __init__(self) -> None:
        """Knows none."""
        self._lengths: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._lengths)

    def get(self, size: bytes) -> int | None:
        """Returns the tokens of a medium; None if they are unknown."""
        return self._lengths.get(size)

    def learn(self, size: bytes, length: int) -> None:
        """Records the tokens of a medium, in the place of those recorded longest ago if there are too many."""
        self._lengths[size] = length
        if len(self._lengths) > MAX_LENGTHS:
            del self._lengths[next(iter(self._lengths))]

    def forget(self, sizes: Iterable[bytes]) -> None:
        """Forgets lengths that contradict an engine's count."""
        for size in sizes:
            self._lengths.pop(size, None)


@dataclass(frozen=True, slots=True)
class MediaRules:
    """What is known of the media of a model's prompts."""

    placeholders: Mapping[MediumKind, tuple[int, ...]]
    """Tokens that the template may write in the place of a medium."""
    lengths: MediaLengths
    engine: str = ""
    engine_model: str = ""
    """The model as the engine names it."""
    domain: str = ""
    """Isolation domain of the request, which learns from no other."""


@dataclass(slots=True)
class _Placed:
    medium: Medium
    id: str = ""
    is_indexed: bool = False
    """Whether the engine's events have the id."""
    pixels: tuple[int, int] | None = None
    """Width and height of an image; None if they are unknown."""
    size: bytes = b""
    """Digest that is equal for media of which an engine makes equally many tokens."""
    length: int = ASSUMED_TOKENS
    """Its tokens; assumed ones unless they are known."""
    is_known: bool = False


class PromptMedia(msgspec.Struct, eq=False):
    """The media of one prompt, in the order of its parts: taken, then identified, then placed among its tokens."""

    _options: bytes = b""
    """Fields of the body by which the engine changes media, as they are; empty for none."""
    hashes: list[MultimodalHash] = []
    """Place and hash of each medium, once placed."""
    _media: list[_Placed] = []
    _lengths: MediaLengths | None = None

    def __len__(self) -> int:
        return len(self._media)

    @property
    def is_counted(self) -> bool:
        """Whether the number of tokens of each placed medium is known."""
        return all(placed.is_known for placed in self._media)

    def take(self, part: Mapping[str, Any]) -> dict[str, Any] | None:
        """Takes the medium of a message's part. Returns the part for the template; None if it has no medium.

        Raises:
            BadRequest: the prompt has too many.
        """
        medium = read_medium(part)
        if medium is None:
            return None
        if len(self._media) == MAX_MEDIA:
            raise BadRequest(f"the chat has more than {MAX_MEDIA} images, sounds and videos", field="messages")
        self._media.append(_Placed(medium))
        return {"type": medium.kind}

    def identify(self, rules: MediaRules) -> Slices[None]:
        """Computes the id of each medium, in slices."""
        self._lengths = rules.lengths
        work = 0
        for placed in self._media:
            medium = placed.medium
            work += len(medium.base64) + _MEDIUM_WORK
            if work > _SLICE:
                work = 0
                yield
            if medium.uuid and rules.engine == "vllm" and not self._options:
                placed.id, placed.is_indexed = medium.uuid, True
            elif medium.base64:
                yield from self._identify_content(placed, rules)
            else:
                yield from self._identify_text(placed, medium.url or medium.uuid)
            determined_by = (rules.domain, self._options, placed.pixels or placed.id)
            placed.size = blake3(repr(determined_by).encode()).digest(_SIZE_BYTES)

    def place(self, tokens: bytes, rules: MediaRules, limit: int) -> bytes:
        """Returns a prompt with as many tokens for each medium as its engine makes; it has one for each, packed.

        Raises:
            BadRequest: the template has written no placeholder for a medium, or a text has one.
            PromptTooLong: there are more tokens than the limit.
        """
        by_kind: dict[MediumKind, list[_Placed]] = {}
        for placed in self._media:
            by_kind.setdefault(placed.medium.kind, []).append(placed)
        places: list[tuple[int, _Placed]] = []
        for kind, media in by_kind.items():
            found = (_positions(tokens, token, len(media)) for token in rules.placeholders.get(kind, ()))
            positions = next((each for each in found if len(each) == len(media)), None)
            if positions is None:
                raise BadRequest(f"the chat template does not place each {kind} of the chat", field="messages")
            places += zip(positions, media, strict=True)
        places.sort(key=lambda place: place[0])
        for placed in self._media:
            if (known := rules.lengths.get(placed.size)) is not None:
                placed.length, placed.is_known = known, True
        # If a length is assumed, the prompt could have more blocks here than at its engine.
        is_predicted = self.is_counted
        parts: list[bytes] = []
        end = length = 0
        for position, placed in places:
            placeholder = tokens[position : position + _TOKEN_BYTES]
            length += (position - end) // _TOKEN_BYTES
            content_hash, is_unindexed = multimodal_hash(placed.id), is_predicted and not placed.is_indexed
            self.hashes.append(MultimodalHash(token_index=length, hash=content_hash, unindexed=is_unindexed))
            length += placed.length
            if length > limit:
                raise PromptTooLong(length, limit, field="messages")
            parts += (tokens[end:position], placeholder * placed.length)
            end = position + _TOKEN_BYTES
        return b"".join((*parts, tokens[end:]))

    def learn(self, prompt_tokens: int, counted: int) -> None:
        """Learns the length of a medium from the engine's count of the prompt's tokens, if all others are known.

        Args:
            prompt_tokens: Tokens of the prompt as placed here.
            counted: Tokens of the prompt at the engine.
        """
        if self._lengths is None:
            return
        unknown = [placed for placed in self._media if not placed.is_known]
        sizes = {placed.size for placed in unknown}
        if not unknown and prompt_tokens != counted:
            self._lengths.forget({placed.size for placed in self._media})
        elif len(sizes) == 1:
            rest = counted - prompt_tokens + sum(placed.length for placed in unknown)
            length, remainder = divmod(rest, len(unknown))
            if length > 0 and not remainder:
                self._lengths.learn(sizes.pop(), length)

    def _identify_content(self, placed: _Placed, rules: MediaRules) -> Slices[None]:
        """Computes the id that an image has in vLLM's events, or a digest where that id cannot be known."""
        content = placed.medium.base64
        if placed.medium.kind != "image":
            yield from self._identify_text(placed, content)
            return
        try:
            pieces = (_decoded(content[at : at + _PIECE]) for at in range(0, len(content), _PIECE))
            head = b"".join(islice(pieces, _HEAD_PIECES))
            header = read_image_header(head)
            if header is not None:
                placed.pixels = header.width, header.height
                placed.length = max(1, min(header.width * header.height // _PIXELS_PER_TOKEN, ASSUMED_TOKENS))
            if header is None or rules.engine != "vllm" or self._options:
                yield from self._identify_text(placed, content)
                return
            size = len(content) // 4 * 3 - content.count("=", -2)
            image_id = VllmImageId(rules.engine_model, header, size)
            image_id.update(head)
            for number, piece in enumerate(pieces):
                image_id.update(piece)
                if number % _PIECES_OF_SLICE == 0:
                    yield
            placed.id, placed.is_indexed = image_id.hexdigest(), True
        except msgspec.ValidationError:
            yield from self._identify_text(placed, content)  # The engine refuses it.

    def _identify_text(self, placed: _Placed, text: str) -> Slices[None]:
        digest = blake3(b"%b\0%b\0" % (placed.medium.kind.encode(), self._options))
        for number, at in enumerate(range(0, len(text), _PIECE)):
            digest.update(text[at : at + _PIECE].encode("utf-8", "surrogatepass"))
            if number % _PIECES_OF_SLICE == _PIECES_OF_SLICE - 1:
                yield
        placed.id = digest.hexdigest()


def _decoded(piece: str) -> bytes:
    """Decodes base64. Raises msgspec.ValidationError if it is none."""
    return msgspec.convert(piece, bytes)


def _positions(tokens: bytes, token: int, most: int) -> list[int]:
    """Returns the offsets of a token in a packed buffer, one more than ``most`` at most."""
    searched = token.to_bytes(_TOKEN_BYTES, "little")
    positions: list[int] = []
    at = tokens.find(searched)
    while at >= 0 and len(positions) <= most:
        if at % _TOKEN_BYTES:
            at = tokens.find(searched, at + 1)
            continue
        positions.append(at)
        at = tokens.find(searched, at + _TOKEN_BYTES)
    return positions
