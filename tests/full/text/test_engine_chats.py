"""Generated chats with tools have the tokens that vLLM and SGLang give them with their own code.

KVROUTER_VLLM_PYTHON and KVROUTER_SGLANG_PYTHON name Pythons with the engines. ``python -m
tests.full.text.test_engine_chats ENGINE`` writes what the test in tests/unit expects.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ...byte_tokenizer import write_byte_tokenizer
from ...tool_chats import STORED, TEMPLATES, digest, generate, prompt_ids, templates_of

SEED = 1
COUNT = 1000
STORED_COUNT = 300


def of_engine(engine: str, python: str, directory: Path) -> tuple[str, list[dict[str, Any]]]:
    """Returns the engine's release, and its token ids or error of each chat."""
    write_byte_tokenizer(directory)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 256}
    config = json.dumps(model | sizes | {"max_position_embeddings": 1 << 20})
    (directory / "config.json").write_text(config)
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    script = str(Path(__file__).with_name(f"{engine}_reference.py"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    given = json.dumps({"templates": TEMPLATES, "chats": generate(SEED, COUNT)}).encode()
    command = [python, script, str(directory)]
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, env=environment, check=True, timeout=900)
    answer = json.loads(done.stdout)
    return answer["release"], answer["results"]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_prompts_of_chats_with_tools_are_those_of_the_engine(engine: str, tmp_path: Path) -> None:
    variable = f"KVROUTER_{engine.upper()}_PYTHON"
    python = os.environ.get(variable)
    if python is None:
        pytest.skip(f"{variable} names no Python with {engine}")
    _, results = of_engine(engine, python, tmp_path / "model")
    models = templates_of(engine, tmp_path / "model")
    different = [
        number
        for number, (chat, result) in enumerate(zip(generate(SEED, COUNT), results, strict=True))
        if prompt_ids(models[chat["template"]], chat) != result.get("ids")
    ]
    assert different == []


def _store(engine: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        release, results = of_engine(engine, os.environ[f"KVROUTER_{engine.upper()}_PYTHON"], Path(directory))
    digests = " ".join(digest(result["ids"]) for result in results[:STORED_COUNT])
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    stored[engine] = {"release": release, "seed": SEED, "digests": digests}
    STORED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    _store(sys.argv[1])
