"""Some seventy chat templates of published models are rendered as transformers renders them.

They come from the source package of llama-cpp-python, and the special tokens that they use from an npm package.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from kvrouter.frontend.edge.chat_request import parse_chat
from kvrouter.frontend.text.chat_template import ChatTemplate
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.net.model_files import read_model_files
from kvrouter.v1.errors import BadRequest

from .chats import CHATS, body, has_parts
from .conftest import Reference, run, unpacked_model

PACKAGE = "llama-cpp-python==0.3.36"
LIMIT = 1 << 24
EXPECTED = (
    "Mistral-Nemo",
    "Mistral-Small-3.2",
    "Llama-3.1",
    "Llama-3.3",
    "Qwen2.5",
    "Hermes-3",
    "DeepSeek-V3.1",
    "GLM-4.6",
)
"""Parts of names that must be among the templates."""


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("templates")
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder), PACKAGE)
    (archive,) = folder.glob("*.tar.gz")
    run("tar", "xzf", str(archive), "-C", str(folder), "--wildcards", "*/models/templates/*.jinja")
    archive.unlink()
    return {path.stem: path.read_text() for path in sorted(folder.rglob("*.jinja"))}


@pytest.mark.timeout(1200)
def test_templates_render_as_in_transformers(reference: Reference, templates: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    assert all(any(part in name for name in templates) for part in EXPECTED)
    directory = unpacked_model("llama3_1", "3.7.2", tmp_path)
    model = ModelText(read_model_files(directory), cache_bytes=1 << 26)
    found = reference(directory, {"texts": [], "chats": CHATS, "templates": templates})["templates"]
    different = [
        (name, number)
        for name, source in templates.items()
        for number, chat in enumerate(CHATS)
        if not equal(model, source, chat, found[name][number])
    ]
    assert different == []


def equal(model: ModelText, source: str, chat: dict[str, Any], expected: dict[str, Any]) -> bool:
    model.template = ChatTemplate(source, model.special_tokens)
    (prompt,) = parse_chat(json.dumps(body(chat)).encode()).prompts
    if has_parts(chat) and not model.template.takes_parts:
        return True
    try:
        tokens = completed(prompt.slices(model, LIMIT))
    except BadRequest:
        return "error" in expected
    return "ids" in expected and list(memoryview(tokens).cast("I")) == expected["ids"]
