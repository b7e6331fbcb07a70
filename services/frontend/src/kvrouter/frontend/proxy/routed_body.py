"""The fields of an OpenAI request body for routing. Everything else is the business of the engine that parses it.

The prompt is tokenized only to find the worker with its prefix. Whatever cannot be tokenized here, such as embeddings,
is routed on load: the engine knows more fields and contents, and refuses bad ones itself.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec
from blake3 import blake3
from kvrouter.engines.fields import CHATS, has_salt
from kvrouter.frontend.edge.messages_request import MessagesRequest
from kvrouter.frontend.edge.request_fields import MAX_SEQUENCES, RANK_HEADER, requested_rank
from kvrouter.frontend.edge.responses_request import ResponsesRequest
from kvrouter.frontend.edge.token_list import TokenPrompt
from kvrouter.frontend.edge.translated_request import TranslatedPrompt, TranslatedRequest, shallow
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.proxy.routed_fields import PassedChat, PassedText, given, read_fields, read_token_lists
from kvrouter.frontend.request.request_checks import check_vocabulary
from kvrouter.frontend.text.client_work import LONG_BODY_BYTES, ClientWork
from kvrouter.frontend.text.model_text import PromptSource
from kvrouter.frontend.text.prompt_media import PromptMedia
from kvrouter.frontend.text.text_models import TextModels
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.errors import BadRequest, KvRouterError, Overloaded, RateLimited
from kvrouter.v1.frontend_pb2 import RoutedOn
from kvrouter.v1.registry_pb2 import WorkerRegistration
from msgspec.structs import replace

_TOKEN_LIST = re.compile(rb'\[\s*[^"\[\]\s]')
"""The beginning of a list with no texts and no lists."""
_MODEL_PART = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,1024})\r\n')
"""The model in a form, as transcriptions of speech are requested."""
_DATA_URL = re.compile(rb'"data:[^"]{512,}"')
_MEDIUM_BYTES = 256 * TOKEN_BYTES
"""Bytes standing for an image or sound in an untokenized prompt: engines make some 256 tokens of one."""
_MAX_TOKENS = (1 << 32) - 1
# Reading one from its enum takes over a microsecond.
_ON_LOAD, _ON_TOKENS = RoutedOn.ROUTED_ON_LOAD, RoutedOn.ROUTED_ON_TOKENS
_ON_ESTIMATE, _ON_TEXT = RoutedOn.ROUTED_ON_ESTIMATE, RoutedOn.ROUTED_ON_TEXT
_PRIORITIES = range(-(1 << 31), 1 << 31)

TRANSLATED: Mapping[str, type[TranslatedRequest]] = {kind.path: kind for kind in (MessagesRequest, ResponsesRequest)}
"""APIs whose bodies become chats, by path."""


class RoutedBody(msgspec.Struct):
    """The parts of a request body that decide where it goes. They change in place until the request is forwarded."""

    model: str
    """Name of the model or LoRA adapter; empty if the body names none."""
    pool: str = ""
    """Name of the component that must serve it; empty for any."""
    token_ids: bytes = b""
    """Prompt as packed token ids. While it is not tokenized, each four of its bytes stand for a token: that is its
    typical length, and prompts with the same beginning have the same first blocks. No engine reports such blocks, so
    where workers publish events the request is routed on load; in approximate mode it follows its prefix."""
    is_tokenized: bool = True
    """Whether the token ids are those the engine computes with."""
    has_prompt: bool = True
    is_one_text: bool = False
    """Whether it is a completion of one text, and nothing but its tokens counts: an engine may get these instead."""
    media: PromptMedia | None = None
    """Its images, sounds and videos, which are found when the prompt is tokenized; None if it can have none."""
    source: PromptSource | None = None
    """The prompt to tokenize; None for a list of token ids, and where only the engine knows the tokens."""
    listed_ids: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    """Token ids the client lists, by field, packed: those of all of its prompts."""
    max_output_tokens: int = 0
    """Maximum number of output tokens of a sequence."""
    sequences: int = 1
    """Number of sequences the engine computes of a prompt."""
    is_stream: bool = False
    """Whether the response is to be a stream."""
    cache_salt: str = ""
    """Salt of its caches, for engines."""
    salted_path: str = ""
    """Path at which the engine must separate caches by salt, since the tenant is isolated; empty if it need not."""
    priority: int = 0
    dp_rank: int | None = None
    """Data-parallel rank the client names in a header; None for any."""
    conversation_id: str = ""
    """Conversation it belongs to; empty for none."""
    prompt_cache_key: str = ""
    """Key by which the client groups requests; empty for none."""

    def __repr__(self) -> str:
        """Returns a text without the prompt."""
        return f"RoutedBody(model={self.model!r}, prompt_tokens={self.prompt_tokens})"

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; an estimate if they are not tokenized."""
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def is_estimated(self) -> bool:
        """Whether only the engine knows the number of prompt tokens for certain."""
        return not self.is_tokenized or bool(self.media)

    def choose(self, model: str, headers: Mapping[str, str], conversation: str, pool: str = "") -> None:
        """Sets the model and pool chosen for the request, the rank in its headers, and its conversation.

        Raises:
            BadRequest: the rank is not a number.
        """
        self.model, self.pool, self.conversation_id = model, pool, conversation
        if RANK_HEADER in headers:
            self.dp_rank = requested_rank(headers)

    def may_run_at(self, worker: WorkerRegistration) -> bool:
        """Returns whether a worker's engine separates caches by salt, if it must."""
        return not self.salted_path or has_salt(worker.engine, self.salted_path)

    def routed_on(self, view: ComponentView) -> RoutedOn:
        """Returns a decision's knowledge of the prompt. Workers with events report tokens: no text is found there."""
        if self.is_tokenized:
            return _ON_TOKENS
        if not self.has_prompt:
            return _ON_LOAD
        return _ON_ESTIMATE if view.publishes_events else _ON_TEXT

    @classmethod
    def parse(
        cls, body: bytes | bytearray, *, max_prompt_tokens: int, api: type[TranslatedRequest] | None = None
    ) -> RoutedBody:
        """Parses a JSON body. A text is not tokenized yet. ``api`` is that of a body which is no chat or completion.

        Raises:
            BadRequest: it is not a JSON object, or one of these fields has an impossible type.
            PromptTooLong: the prompt has more token ids than the limit.
        """
        fields, has_data_url = read_fields(body)
        if fields.priority and fields.priority not in _PRIORITIES:
            raise BadRequest("priority: out of range", field="priority", advice="Send an integer of 32 bits.")
        output = fields.max_completion_tokens or fields.max_output_tokens or fields.max_tokens or 0
        if not 0 <= output <= _MAX_TOKENS:
            output = 0 if output < 0 else _MAX_TOKENS
        sequences = 1
        if fields.n or fields.best_of:
            sequences = max(1, min(max(fields.n or 1, fields.best_of or 1), MAX_SEQUENCES))
        prompt, is_rendered = given(fields.prompt) if fields.prompt else b"", fields.is_rendered_by_engine
        is_listed, is_one_text = bool(prompt) and _TOKEN_LIST.match(prompt) is not None, False
        source: PromptSource | None = None
        media: PromptMedia | None = None
        listed: dict[str, bytes] = {}
        if is_listed:
            content, token_ids = prompt, TokenPrompt(prompt, limit=max_prompt_tokens).token_ids
            listed = {"prompt": token_ids} | read_token_lists(max_prompt_tokens, stop_token_ids=fields.stop_token_ids)
        else:
            if prompt or fields.input or fields.stop_token_ids:
                listed = read_token_lists(
                    max_prompt_tokens, prompt=fields.prompt, input=fields.input, stop_token_ids=fields.stop_token_ids
                )
            content = prompt or given(fields.messages)
            if api is not None:
                media = PromptMedia()
                source, content = TranslatedPrompt(body, api, media), content or given(fields.input)
            elif not is_rendered and prompt:
                source = PassedText(prompt, adds_special_tokens=fields.add_special_tokens is not False)
                is_one_text = prompt.startswith(b'"') and not fields.needs_text
            elif not is_rendered and content:
                media = PromptMedia(bytes(fields.media_io_kwargs) + bytes(fields.mm_processor_kwargs))
                source = PassedChat(fields, media)
            token_ids = _stand_in(content, max_prompt_tokens, has_data_url=has_data_url)
        return cls(
            model=fields.model or "",
            token_ids=token_ids,
            is_tokenized=is_listed and not is_rendered,
            has_prompt=bool(content),
            is_one_text=is_one_text,
            media=media,
            source=source,
            listed_ids=listed,
            max_output_tokens=output,
            sequences=sequences,
            is_stream=bool(fields.stream),
            cache_salt=fields.cache_salt or "",
            priority=fields.priority or 0,
            conversation_id=_text(fields.conversation_id) if fields.conversation_id else "",
            prompt_cache_key=_text(fields.prompt_cache_key) if fields.prompt_cache_key else "",
        )

    def as_chat(
        self, body: bytes | bytearray, *, api: type[TranslatedRequest], max_prompt_tokens: int
    ) -> tuple[RoutedBody, TranslatedRequest, bytes]:
        """Translates the body, of another API, to a chat of its model. Returns what routes it, the chat, and its body.

        Raises:
            BadRequest: it has a field or content that no chat can express; the error names it.
        """
        with shallow():
            translated = api.parse(body, is_checked=True)
            translated.chat["model"] = self.model
            messages = translated.engine_messages()
            chat = translated.engine_body(messages)
        source = TranslatedPrompt(body, api, self.media, translated.chat)
        return replace(self, token_ids=_stand_in(messages, max_prompt_tokens), source=source), translated, chat

    @classmethod
    def on_load(cls, model: str) -> RoutedBody:
        """Returns a body that is routed on load only: it counts as a prompt of one token."""
        return cls(model, token_ids=bytes(TOKEN_BYTES), is_tokenized=False, has_prompt=False)

    @classmethod
    def unread(cls, body: bytes | bytearray) -> RoutedBody:
        """Returns a body other than JSON, which counts as much as an image."""
        form_model = _MODEL_PART.search(body)
        digest = blake3(body[:LONG_BODY_BYTES]).digest(_MEDIUM_BYTES)
        model = form_model[1].decode(errors="replace") if form_model else ""
        return cls(model=model, token_ids=digest, is_tokenized=False)

    @classmethod
    def read(
        cls,
        body: bytes | bytearray,
        work: ClientWork,
        path: str = CHATS,
        *,
        max_prompt_tokens: int,
        is_json: bool = True,
    ) -> Awaitable[RoutedBody]:
        """Does the same as ``parse``, or as ``unread`` if the body is not JSON, with a long body in a thread.

        ``path`` is that of the request, and names the API. Parsing releases the GIL between pieces of the prompt.

        Raises:
            BadRequest, PromptTooLong, RateLimited, Overloaded.
        """
        parse: Callable[[bytes | bytearray], RoutedBody] = cls.unread
        if is_json:
            parse = partial(cls.parse, max_prompt_tokens=max_prompt_tokens, api=TRANSLATED.get(path))
        return work.read(parse, body)

    async def tokenize(self, texts: TextModels, model: str, *, max_prompt_tokens: int) -> None:
        """Sets the tokens of the prompt, as far as they can be known here. Checks those that the body lists.

        Args:
            texts: Tokenizers of the served models.
            model: Name of the base model.
            max_prompt_tokens: Maximum number of tokens.

        Raises:
            BadRequest: the model does not have a token the body lists.
            RateLimited, Overloaded: too much text waits.
        """
        if self.listed_ids:
            vocabulary = texts.vocabulary_size(model)
            for name, token_ids in self.listed_ids.items():
                check_vocabulary(token_ids, vocabulary, name)
        source, self.source = self.source, None
        if source is None or (text := texts.find(model)) is None:
            return
        try:
            (token_ids,) = await texts.tokens(text, [source], max_prompt_tokens, salt=self.cache_salt)
        except (RateLimited, Overloaded):
            raise
        except KvRouterError:
            self.media = None
            return
        if token_ids:
            self.token_ids, self.is_tokenized = token_ids, self.media is None or self.media.is_counted

    def counted(self, prompt_tokens: int | None) -> None:
        """Takes the engine's count of the prompt's tokens, if it reports one: it says how long the media are."""
        if self.media and prompt_tokens is not None:
            self.media.learn(self.prompt_tokens, prompt_tokens)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _stand_in(prompt: bytes, limit: int, *, has_data_url: bool = True) -> bytes:
    """Returns bytes in the place of tokens, four for each. An image is replaced by its digest, since it is long.

    ``has_data_url``: whether it may contain an image.
    """
    # Found from the end in a third of the time.
    if has_data_url and prompt.rfind(b'"data:') >= 0:
        prompt = _DATA_URL.sub(lambda found: blake3(found[0]).digest(_MEDIUM_BYTES), prompt)
    prompt = prompt.ljust(TOKEN_BYTES)[: limit * TOKEN_BYTES]
    return prompt[: len(prompt) // TOKEN_BYTES * TOKEN_BYTES]
