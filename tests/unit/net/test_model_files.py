"""Where the files of a model are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvrouter.net.model_files import model_directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


def cached(cache: Path, folder: str, revision: str = "0123") -> Path:
    snapshot = cache / folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (cache / folder / "refs").mkdir()
    (cache / folder / "refs" / "main").write_text(revision)
    return snapshot


def test_a_directory_is_taken_as_it_is(tmp_path: Path, cache: Path) -> None:
    assert model_directory(str(tmp_path)) == tmp_path
    assert model_directory(str(cache / "missing")) is None


@pytest.mark.parametrize(("model", "folder"), [("org/m-1.5", "models--org--m-1.5"), ("gpt2", "models--gpt2")])
def test_a_name_is_looked_up_in_the_cache(cache: Path, model: str, folder: str) -> None:
    assert model_directory(model) is None
    snapshot = cached(cache, folder)
    assert model_directory(model) == snapshot


def test_the_caches_own_variable_counts_more(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(cache, "models--org--m")
    other = cached(tmp_path / "other", "models--org--m")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert model_directory("org/m") == other


@pytest.mark.parametrize("model", ["../m", "org/../../m", "org/", "a/b/c", "org\0/m"])
def test_other_texts_are_no_names(cache: Path, model: str) -> None:
    cached(cache, "models--org--m")
    assert model_directory(model) is None


def test_a_cache_without_the_snapshot_has_none(cache: Path) -> None:
    cached(cache, "models--org--m").rmdir()
    assert model_directory("org/m") is None
