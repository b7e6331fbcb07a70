"""Renders and tokenizes chats with SGLang's own code, as its server does. Runs in an environment with SGLang.

    python sglang_reference.py DIRECTORY < chats.json > results.json

Input and output are those of ``vllm_reference.py``. What the code asks of a running server has SGLang's defaults.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format
from sglang.version import __version__
from transformers import AutoTokenizer

serving_chat.get_serving = lambda: SimpleNamespace(
    default_chat_template_kwargs=None, trust_request_chat_template=False, allow_auto_truncate=False
)
serving_chat.get_model = lambda: SimpleNamespace(revision=None, context_length=1 << 20)


def serving(directory: str, template: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    tokenizer.chat_template = template
    manager = MagicMock(
        tokenizer=tokenizer,
        config_value=dict[str, str]().get,
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(model_type="llama", architectures=["LlamaForCausalLM"]),
            get_default_sampling_params=dict,
            is_multimodal=False,
        ),
    )
    templates = MagicMock(
        chat_template_name=None,
        jinja_template_content_format=detect_jinja_template_content_format(template),
        jinja_template_may_reorder_tool_results=False,
        python_chat_template=None,
        reasoning_config=None,
    )
    return serving_chat.OpenAIServingChat(manager, templates)


def ids(serving: Any, chat: dict[str, Any]) -> dict[str, Any]:
    try:
        request = ChatCompletionRequest.model_validate(chat)
        if error := serving._validate_request(request):
            return {"error": error}
        return {"ids": list(serving._process_messages(request, False).prompt_ids)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    given = json.load(sys.stdin)
    servings = {name: serving(sys.argv[1], template) for name, template in given["templates"].items()}
    results = [ids(servings[chat.pop("template")], chat) for chat in given["chats"]]
    json.dump({"release": __version__, "results": results}, sys.stdout)


main()
