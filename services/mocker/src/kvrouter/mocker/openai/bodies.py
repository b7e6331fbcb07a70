"""Bodies of ``/v1/completions`` and ``/v1/chat/completions``, with the fields that vLLM and SGLang add.

Fields that are not listed are ignored, as by both engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from kvrouter.engines.chats import chat_rule
from kvrouter.mocker.serving.errors import ApiError
from kvrouter.mocker.serving.tokenizer import encode
from kvrouter.mocker.tools import asked_tool


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields of both bodies. Those without effect on the simulation are checked for their type."""

    model: str | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    temperature: float | None = None
    seed: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool = False
    response_format: dict[str, Any] | None = None
    # vLLM
    structured_outputs: dict[str, Any] | None = None
    request_id: str = ""
    cache_salt: str | None = None
    priority: int = 0
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    # SGLang
    rid: str | None = None
    extra_key: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    lora_path: str | None = None
    json_schema: str | None = None
    regex: str | None = None
    no_stop_trim: bool = False

    @property
    def choices(self) -> int:
        """Sequences to generate for each prompt.

        Raises:
            ApiError: there are none.
        """
        if self.n is not None and self.n < 1:
            raise ApiError(400, f"n must be at least 1, got {self.n}.", param="n")
        return self.n or 1

    def stop_strings(self) -> list[str]:
        """Returns the stop strings."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stop:
            raise ApiError(400, "stop cannot contain an empty string.", param="stop")
        return stop

    def output_tokens(self) -> int | None:
        """Returns the requested length of the output; None for what the context leaves."""
        raise NotImplementedError

    def wanted_logprobs(self) -> bool:
        """Returns whether log probabilities of the output are requested."""
        raise NotImplementedError

    def called_tool(self) -> Mapping[str, Any] | None:
        """Returns the function that the output calls; None for none."""
        return None

    def prompts(self) -> list[list[int]]:
        """Returns the token ids of each prompt."""
        raise NotImplementedError


class CompletionBody(GenerationBody, kw_only=True):
    """The body of ``/v1/completions``."""

    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False

    def output_tokens(self) -> int | None:  # noqa: D102
        return 16 if self.max_tokens is None else self.max_tokens

    def wanted_logprobs(self) -> bool:  # noqa: D102
        return self.logprobs is not None

    def prompts(self) -> list[list[int]]:  # noqa: D102
        if self.echo:
            raise ApiError(501, "The simulated engine does not echo prompts.", param="echo")
        listed: list[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt or []
        if listed and all(isinstance(each, int) for each in listed):
            listed = [listed]
        prompts = [encode(each) if isinstance(each, str) else each for each in listed]
        if not prompts or not all(isinstance(each, list) and each for each in prompts):
            raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        return prompts


class TextPart(msgspec.Struct):
    """A part of a message's content: a text, or a medium that the simulated engine writes as one."""

    type: str
    text: str = ""
    image_url: Any = None
    audio_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    uuid: str | None = None


class Message(msgspec.Struct):
    """A message of a chat."""

    role: str
    content: str | list[TextPart] | None = None

    def text(self, separator: str = "") -> str:
        """Returns the text of the content, with a separator between its parts.

        There is none if one of them is a medium: then the chat template of the model gets the parts one by one.
        """
        if isinstance(self.content, list):
            separator = separator if all(part.type == "text" for part in self.content) else ""
            return separator.join(part.text for part in self.content)
        return self.content or ""


class ChatBody(GenerationBody, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    engine: ClassVar[str] = "vllm"
    """Engine whose form of chats the template gets."""
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    def called_tool(self) -> Mapping[str, Any] | None:  # noqa: D102
        functions: list[dict[str, Any]] = [tool.get("function", {}) for tool in self.tools or []]
        named = self.tool_choice.get("function", {}).get("name") if isinstance(self.tool_choice, dict) else None
        if named is not None:
            functions = [each for each in functions if each.get("name") == named]
        if self.tool_choice == "required" or named is not None:
            if not functions:
                raise ApiError(400, "tool_choice names none of the tools.", param="tool_choice")
            return functions[0]
        if self.tool_choice == "none" or not self.messages or self.messages[-1].role != "user":
            return None
        return asked_tool(self.messages[-1].text(), [each for each in functions if "name" in each])

    def output_tokens(self) -> int | None:  # noqa: D102
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def wanted_logprobs(self) -> bool:  # noqa: D102
        return bool(self.logprobs)

    def prompts(self) -> list[list[int]]:  # noqa: D102
        if not self.messages:
            raise ApiError(400, "messages must not be empty", param="messages")
        return [encode(self._rendered())]

    def _rendered(self) -> str:
        """Returns the prompt of the chat, by the simulated model's template."""
        rule = chat_rule(self.engine)
        tools = rule.tools(self.tools, self.tool_choice) if self.tools else []
        described = "".join(f"{json.dumps(tool, ensure_ascii=False)}\n" for tool in tools)
        messages = "".join(f"<|{each.role}|>\n{each.text(rule.part_separator)}\n" for each in self.messages)
        return f"{'<|tools|>' if tools else ''}{described}{messages}<|assistant|>\n"


Body = TypeVar("Body")


def parse(raw: bytes, kind: type[Body]) -> Body:
    """Returns the decoded body.

    Raises:
        ApiError: it is not JSON, or a field has another type.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"{error}") from None
