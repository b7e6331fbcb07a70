"""The fields of an OpenAI request body that routing reads, and the prompt among them."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from kvrouter.core import split_json
from kvrouter.frontend.edge.chat_prompt import AT_ONCE_ITEMS, ChatPrompt
from kvrouter.frontend.edge.json_body import MAX_FIELDS_BYTES, check_structure, decode_json, invalid
from kvrouter.frontend.edge.text_request import parse_prompts
from kvrouter.frontend.edge.token_list import TokenPrompt
from kvrouter.frontend.text.client_work import Slices
from kvrouter.frontend.text.model_text import ModelText, PromptSource
from kvrouter.frontend.text.prompt_media import PromptMedia
from kvrouter.frontend.text.tokenizer import AT_ONCE_CHARACTERS
from kvrouter.v1.errors import BadRequest

_TOKEN_LISTS = re.compile(rb'\[[\s\[]*[^"{\[\]\s]')
"""The beginning of a list of token ids, or of a list of these: neither texts nor objects."""

_Raw = msgspec.Raw


class RoutedFields(msgspec.Struct):
    """The fields. Long ones are decoded later, if they are needed."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    max_output_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    conversation_id: Any = None
    prompt_cache_key: Any = None
    prompt: _Raw = _Raw()
    messages: _Raw = _Raw()
    add_special_tokens: bool | None = None
    tools: _Raw = _Raw()
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    documents: _Raw = _Raw()
    media_io_kwargs: _Raw = _Raw()
    mm_processor_kwargs: _Raw = _Raw()
    # They change the prompt in a way that only the engine knows.
    chat_template: Any = None
    prompt_embeds: Any = None
    truncate_prompt_tokens: Any = None
    stop_token_ids: _Raw = _Raw()
    input: _Raw = _Raw()
    # With them a response depends on the text of its prompt.
    echo: Any = None
    suffix: Any = None
    prompt_logprobs: Any = None

    @property
    def is_rendered_by_engine(self) -> bool:
        """Whether only the engine knows the tokens."""
        return bool(self.chat_template or self.prompt_embeds or self.truncate_prompt_tokens)

    @property
    def needs_text(self) -> bool:
        """Whether the response may depend on more of the prompt than its tokens."""
        return bool(self.echo) or self.suffix is not None or self.prompt_logprobs is not None


class _Short(msgspec.Struct):
    """The fields that are decoded as a whole. They are short in every request made in good faith."""

    model: _Raw = _Raw()
    cache_salt: _Raw = _Raw()
    conversation_id: _Raw = _Raw()
    prompt_cache_key: _Raw = _Raw()
    tool_choice: _Raw = _Raw()
    reasoning_effort: _Raw = _Raw()
    chat_template: _Raw = _Raw()
    chat_template_kwargs: _Raw = _Raw()
    truncate_prompt_tokens: _Raw = _Raw()


_SHORT = msgspec.json.Decoder(_Short)
# As lenient as the engines: what they would refuse is for them to refuse.
_FIELDS = msgspec.json.Decoder(RoutedFields, strict=False)
_PROMPTS = ("prompt", "messages", "input")
"""Fields that are taken out of a body before it is decoded: the decoder takes five times as long to skip them."""
_OBJECTS = msgspec.json.Decoder(list[dict[str, Any]])


def read_fields(body: bytes | bytearray) -> tuple[RoutedFields, bool]:
    """Returns the fields of a JSON body, and whether it may contain a data URL, as of an image.

    Raises:
        BadRequest: it is not a JSON object, or a field has an impossible type or is too long.
    """
    split = split_json(body, _PROMPTS)
    rest = body if split is None else split[0]
    if len(rest) > MAX_FIELDS_BYTES:
        _check_short(rest)
    if split is None:
        return decode_json(_FIELDS, body), True
    _, prompts, has_data_url = split
    fields = decode_json(_FIELDS, rest, is_checked=True)
    fields.prompt, fields.messages, fields.input = map(_Raw, prompts)
    return fields, has_data_url


class PassedText(PromptSource):
    """The prompt of a completion: a text, or a list, whose first element decides."""

    field = "prompt"

    def __init__(self, prompt: bytes, *, adds_special_tokens: bool) -> None:
        """Takes it as JSON. ``adds_special_tokens``: whether its text gets those that the tokenizer adds."""
        self._prompt = prompt
        self._adds_special_tokens = adds_special_tokens
        self.characters = len(prompt)

    def slices(self, text: ModelText | None, limit: int) -> Slices[bytes]:
        """Tokenizes it in slices, and returns its tokens; see ``PromptSource``."""
        if self._prompt[:1] not in (b'"', b"["):
            raise BadRequest("prompt: expected a text or a list", field="prompt")
        prompts = parse_prompts(self._prompt, add_special_tokens=self._adds_special_tokens, limit=limit)
        return (yield from prompts[0].slices(text, limit))


class PassedChat(PromptSource):
    """The messages of a chat, which are decoded only to be rendered."""

    field = "messages"

    def __init__(self, fields: RoutedFields, media: PromptMedia) -> None:
        """Takes it from the fields of a body; ``media`` takes its images, sounds and videos."""
        self._fields = fields
        self._media = media
        self._decoded: ChatPrompt | None = None
        self.characters = len(fields.messages) + len(fields.tools)

    def slices(self, text: ModelText | None, limit: int) -> Slices[bytes]:
        """Tokenizes it in slices, and returns its tokens; see ``PromptSource``."""
        return (yield from self._chat().slices(text, limit))

    def tokens_at_once(self, text: ModelText, limit: int) -> bytes | None:
        """Returns the tokens of a short chat nearly all of which is known; otherwise None."""
        fields = self._fields
        if self.characters > AT_ONCE_CHARACTERS or fields.documents:
            return None
        # About as many as its elements, with those of arguments. Escaped ones are counted after decoding.
        encoded = bytes(fields.messages) + bytes(fields.tools)
        if sum(map(encoded.count, (b"{", b"[", b","))) > AT_ONCE_ITEMS:
            return None
        return self._chat().tokens_at_once(text, limit)

    def _chat(self) -> ChatPrompt:
        """Returns the chat, decoded once: that takes its media."""
        if self._decoded is None:
            fields = self._fields
            if fields.add_special_tokens:
                raise BadRequest("add_special_tokens: not known for a chat", field="add_special_tokens")
            self._decoded = ChatPrompt(
                _objects(fields.messages),
                tools=_objects(fields.tools),
                tool_choice=fields.tool_choice,
                documents=_objects(fields.documents),
                add_generation_prompt=fields.add_generation_prompt,
                continue_final_message=bool(fields.continue_final_message),
                options=fields.chat_template_kwargs,
                reasoning_effort=fields.reasoning_effort,
                characters=self.characters,
                media=self._media,
            )
        return self._decoded


def given(raw: msgspec.Raw) -> bytes:
    """Returns the JSON of a field; empty if it is missing or null."""
    encoded = bytes(raw)
    return b"" if encoded == b"null" else encoded


def read_token_lists(most: int, **fields: _Raw) -> dict[str, bytes]:
    """Returns the token ids in some fields, packed, of all lists of each.

    Raises:
        BadRequest: an element is no token id; the error has its position.
        PromptTooLong: a field is a single list of more than ``most``.
    """
    listed = {}
    for name, listing in fields.items():
        if listing and _TOKEN_LISTS.match(listing):
            raw, limit = bytes(listing), most
            if raw.count(b"[") > 1:
                raw = b"[%b]" % raw.translate(None, b"[]")
                limit = len(raw)
            listed[name] = TokenPrompt(raw, limit=limit, field=name).token_ids
    return listed


def _check_short(body: bytes | bytearray) -> None:
    """Checks that a long body is long only by fields that are not decoded here, or whose size is checked elsewhere.

    Raises:
        BadRequest: a field of ``_Short`` is too long, or the body is malformed.
    """
    fields = decode_json(_SHORT, body, is_checked=True)
    for name in fields.__struct_fields__:
        if len(getattr(fields, name)) > MAX_FIELDS_BYTES:
            raise invalid(name, f"longer than {MAX_FIELDS_BYTES} bytes", "Send a shorter value.")


def _objects(raw: _Raw) -> list[dict[str, Any]]:
    encoded = given(raw)
    if not encoded:
        return []
    check_structure(encoded)
    return decode_json(_OBJECTS, encoded, is_checked=True)
