"""Everything that turns one model's text into tokens and back, loaded from the model's files."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

from kvrouter.engines.chats import chat_rule
from kvrouter.engines.media import PLACEHOLDERS
from kvrouter.frontend.text.call_reader import ToolFormatName, tool_format
from kvrouter.frontend.text.chat_template import ChatTemplate, InvalidTemplate
from kvrouter.frontend.text.client_work import Slices
from kvrouter.frontend.text.output_text import (
    PROMPT_TOKENS,
    Detokenizer,
    ReasoningFormatName,
    ReasoningParser,
    reasoning_format,
)
from kvrouter.frontend.text.prompt_media import MediaLengths, MediaRules
from kvrouter.frontend.text.tokenizer import InvalidTokenizer, ModelTokenizer
from kvrouter.net.model_files import OUTPUT_FORMAT, TOKENIZER

_TOKEN_BYTES = 4
_MARK_TOKENS = 16
"""Tokens at the end of a prompt that may be a mark and white space after it."""


class ModelText:
    """Tokenizer and chat template of a model."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        cache_bytes: int,
        tool_call_format: ToolFormatName | None = None,
        reasoning_format_name: ReasoningFormatName | None = None,
        engine: str = "",
        engine_model: str = "",
    ) -> None:
        """Loads the files, which takes up to seconds.

        Args:
            files: Content of the files by name.
            cache_bytes: Memory of the tokenizer's cache.
            tool_call_format: Name of the format of tool calls; None for that of the files, or of the chat template.
            reasoning_format_name: Name of the format of reasoning; None for that of the files.
            engine: Engine whose prompts are rendered, such as "vllm"; empty if unknown.
            engine_model: The model as that engine names it; empty if unknown.

        Raises:
            InvalidTokenizer: the tokenizer cannot be loaded. An invalid chat template is only reported in
                ``no_template``.
        """
        if TOKENIZER not in files:
            raise InvalidTokenizer(f"expected {TOKENIZER}, found {', '.join(sorted(files)) or 'no file'}")
        config = _json_object(files, "tokenizer_config.json")
        self.special_tokens = _special_tokens(_json_object(files, "special_tokens_map.json")) | _special_tokens(config)
        """Special tokens by name, such as bos_token, which the chat template may use."""
        self.tokenizer = ModelTokenizer(files[TOKENIZER], cache_bytes=cache_bytes)
        self.no_template = ""
        """Why there is no chat template; empty if there is one."""
        self.template: ChatTemplate | None = None
        source = ""
        try:
            source = _template_source(files, config)
            self.template = ChatTemplate(source, self.special_tokens) if source else None
            self.no_template = "" if source else "its tokenizer has no chat template"
        except InvalidTemplate as error:
            self.no_template = str(error)
        published = _names(_json_object(files, OUTPUT_FORMAT))
        self.tool_format = tool_format(tool_call_format or published.get("tool_call_parser"), source)
        """How the model writes tool calls; None if unknown."""
        self.reasoning_format = reasoning_format(reasoning_format_name or published.get("reasoning_parser"))
        """How the model marks reasoning; None if it is not separated."""
        self.chat_rule = chat_rule(engine)
        """A chat as the engine's template gets it."""
        placeholders = {
            kind: tuple(
                number
                for token in (self.special_tokens.get(f"{kind}_token", ""), *names)
                if (number := self.tokenizer.id_of(token)) is not None
            )
            for kind, names in PLACEHOLDERS.items()
        }
        self.media = MediaRules(placeholders, MediaLengths(), engine, engine_model)
        """What is known of the model's images, sounds and videos."""

    def of_domain(self, domain: str) -> ModelText:
        """Returns the same with the caches of an isolation domain, which no other domain can probe by time.

        The first call for any domain takes up to seconds.
        """
        return self._with(self.tokenizer.of_domain(domain), domain)

    def of_known_domain(self, domain: str) -> ModelText | None:
        """Returns the same as ``of_domain`` if it has caches; otherwise None."""
        tokenizer = self.tokenizer.of_known_domain(domain)
        return None if tokenizer is None else self._with(tokenizer, domain)

    def rendered_as(self, engine: str, engine_model: str) -> ModelText:
        """Returns the same with the prompts of another engine."""
        changed = copy(self)
        changed.chat_rule = chat_rule(engine)
        changed.media = replace(self.media, engine=engine, engine_model=engine_model)
        return changed

    def _with(self, tokenizer: ModelTokenizer, domain: str) -> ModelText:
        changed = copy(self)
        changed.tokenizer = tokenizer
        changed.media = replace(self.media, domain=domain)
        return changed

    def detokenizer(self, prompt: bytes, *, skip_special_tokens: bool = True, marks: Sequence[str] = ()) -> Detokenizer:
        """Returns the detokenizer of an output after a prompt, a packed buffer.

        Args:
            prompt: The prompt.
            skip_special_tokens: Whether special tokens have no text.
            marks: Special tokens with one nevertheless.
        """
        shown = {number: mark for mark in marks if (number := self.tokenizer.id_of(mark)) is not None}
        end = array("I", prompt[-PROMPT_TOKENS * _TOKEN_BYTES :])
        return Detokenizer(self.tokenizer.library, end, skip_special_tokens=skip_special_tokens, shown=shown)

    def reasoning_parser(self, prompt: bytes, continued: str | None = None) -> ReasoningParser | None:
        """Returns the parser of an output's reasoning; None if the model's is not separated.

        Args:
            prompt: The prompt, a packed buffer.
            continued: Its text if it ends within a message of the model, which may have reasoning; None otherwise.
        """
        form = self.reasoning_format
        if form is None:
            return None
        if continued is not None:
            return ReasoningParser(form, is_open=form.is_open(continued))
        # Whatever the messages say about marks, the template writes one at the very end.
        end = self.text_of(array("I", prompt[-_MARK_TOKENS * _TOKEN_BYTES :])).rstrip()
        return ReasoningParser(form, is_open=end.endswith(form.begin))

    def text_of_prompt(self, prompt: bytes) -> str:
        """Returns the text of a prompt, a packed buffer, special tokens included.

        A long one takes 0.2 s, in which a thread gives up the GIL, unlike in ``text_of``.
        """
        known = [token for token in array("I", prompt) if token < self.tokenizer.vocabulary_size]
        (text,) = self.tokenizer.library.decode_batch([known], skip_special_tokens=False)
        return str(text)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, special tokens included."""
        known = [token for token in token_ids if token < self.tokenizer.vocabulary_size]
        return str(self.tokenizer.library.decode(known, skip_special_tokens=False))


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        parsed = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise InvalidTokenizer(f"{name} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidTokenizer(f"{name}: expected a JSON object")
    return parsed


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values that are texts."""
    return {name: value for name, value in config.items() if isinstance(value, str) and value}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens by name, such as eos_token. A token is a text, or an object with its text."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str:
    """Returns the chat template: of its own file, or of tokenizer_config.json. Of several, the one named default."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8", "replace")
    found = _json_object(files, "chat_template.json").get("chat_template") or config.get("chat_template") or ""
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default") or ""
    if not isinstance(found, str):
        raise InvalidTemplate("expected the chat template as text")
    return found


class PromptSource(Protocol):
    """One prompt, not tokenized yet."""

    field: str
    """The field of the body that has it."""
    characters: int
    """Its size."""

    def slices(self, text: ModelText | None, limit: int) -> Slices[bytes]:
        """Renders and tokenizes it in slices, and returns its tokens as a packed buffer. Runs in a thread.

        Raises:
            BadRequest, PromptTooLong.
        """

    def tokens_at_once(self, text: ModelText, limit: int) -> bytes | None:  # noqa: ARG002
        """Returns the same if that takes about a millisecond at most; otherwise None. Runs on the event loop.

        Raises:
            BadRequest, PromptTooLong.
        """
        return None
