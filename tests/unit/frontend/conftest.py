from __future__ import annotations

from pathlib import Path

import pytest
from kvrouter.devtools.system.small_tokenizer import write_small_tokenizer
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.net.model_files import read_model_files


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_small_tokenizer(directory)
    return read_model_files(directory)


@pytest.fixture(scope="session")
def model(model_files: dict[str, bytes]) -> ModelText:
    return ModelText(model_files, cache_bytes=1 << 20)
