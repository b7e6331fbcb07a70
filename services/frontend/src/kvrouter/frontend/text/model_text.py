"""Everything that turns one model's text into tokens and back, loaded from the model's files."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from kvrouter.frontend.text.chat_template import ChatTemplate, InvalidTemplate
from kvrouter.frontend.text.detokenizer import PROMPT_TOKENS, Detokenizer
from kvrouter.frontend.text.tokenizer import InvalidTokenizer, ModelTokenizer
from kvrouter.frontend.text.tool_formats import ToolFormatName, tool_format
from kvrouter.net.model_files import TOKENIZER

_TOKEN_BYTES = 4


class ModelText:
    """Tokenizer and chat template of a model."""

    def __init__(
        self, files: Mapping[str, bytes], *, cache_bytes: int, tool_call_format: ToolFormatName | None = None
    ) -> None:
        """Loads the files, which takes up to seconds.

        Args:
            files: Content of the files by name.
            cache_bytes: Memory of the tokenizer's cache.
            tool_call_format: Name of the format of tool calls; None for the one that the chat template writes.

        Raises:
            InvalidTokenizer: the tokenizer cannot be loaded. An invalid chat template is only reported in
                ``no_template``.
        """
        if TOKENIZER not in files:
            raise InvalidTokenizer(f"expected {TOKENIZER}, found {', '.join(sorted(files)) or 'no file'}")
        config = _json_object(files, "tokenizer_config.json")
        special = _special_tokens(_json_object(files, "special_tokens_map.json")) | _special_tokens(config)
        self.tokenizer = ModelTokenizer(files[TOKENIZER], cache_bytes=cache_bytes)
        self.no_template = ""
        """Why there is no chat template; empty if there is one."""
        self.template: ChatTemplate | None = None
        source = ""
        try:
            source = _template_source(files, config)
            self.template = ChatTemplate(source, special) if source else None
            self.no_template = "" if source else "its tokenizer has no chat template"
        except InvalidTemplate as error:
            self.no_template = str(error)
        self.tool_format = tool_format(tool_call_format, source)
        """How the model writes tool calls; None if that is not known."""

    def detokenizer(
        self, prompt: bytes, *, skip_special_tokens: bool = True, shows_tool_calls: bool = False
    ) -> Detokenizer:
        """Returns the detokenizer of an output after a prompt, a packed buffer.

        Args:
            prompt: The prompt.
            skip_special_tokens: Whether special tokens have no text.
            shows_tool_calls: Whether those that mark tool calls have one nevertheless.
        """
        marks = self.tool_format.special if shows_tool_calls and self.tool_format else ()
        shown = {number: mark for mark in marks if (number := self.tokenizer.id_of(mark)) is not None}
        end = array("I", prompt[-PROMPT_TOKENS * _TOKEN_BYTES :])
        return Detokenizer(self.tokenizer.library, end, skip_special_tokens=skip_special_tokens, shown=shown)

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
