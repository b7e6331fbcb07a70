"""Which of the files that workers register a Frontend uses."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.frontend.text.model_files import DescribedFile, Files, agreed_files, files_of
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, ModelFile, WorkerRegistration
from pydantic import ValidationError


def files(content: int) -> list[ModelFile]:
    return [ModelFile(name="tokenizer.json", sha256=bytes([content]) * 32)]


def described(content: int) -> Files:
    return (DescribedFile("tokenizer.json", bytes([content]).hex() * 32),)


def view(contents: Iterable[int | None], name: str = "pool") -> ComponentView:
    """A component with one worker for each content of its tokenizer; None for one without."""
    workers = {
        number: WorkerRegistration(worker_id=number, model_files=() if content is None else files(content))
        for number, content in enumerate(contents)
    }
    return ComponentView(ComponentName("ns", name), ComponentDescriptor(model="m"), workers)


@pytest.mark.parametrize(
    ("registered", "in_use", "expected"),
    [
        ([1, 1, 2], None, 1),
        ([1, 1, 2], 2, 1),
        ([1, 2], 1, 1),
        ([1, 2], 2, 2),
        ([1, None], None, 1),
        ([1, None, None], None, None),
        ([1, None, None], 1, None),
        ([], 1, 1),
        ([None], 1, None),
    ],
)
def test_most_workers_decide(registered: list[int | None], in_use: int | None, expected: int | None) -> None:
    used = () if in_use is None else described(in_use)
    assert agreed_files([view(registered)], used) == (() if expected is None else described(expected))


def test_a_component_with_more_workers_decides_for_its_model() -> None:
    assert agreed_files([view([2], "a"), view([1, 1], "b")], described(2)) == described(1)
    assert agreed_files([view([None, None, None], "a"), view([1], "b")], ()) == described(1)


def test_unknown_names_do_not_count() -> None:
    worker = WorkerRegistration(model_files=[*files(1), ModelFile(name="../x"), ModelFile(name="tokenizer.json.bak")])
    assert files_of(worker) == described(1)


def test_pinned_files_are_used_whatever_workers_register() -> None:
    settings = FrontendSettings(pinned_model_files={"org/model/tokenizer.json": "ab" * 32})
    pinned = settings.pinned_files()["org/model"]
    assert pinned == (DescribedFile("tokenizer.json", "ab" * 32),)
    assert agreed_files([view([1, 1, 1])], described(1), pinned) == pinned


@pytest.mark.parametrize("wrong", [{"model": "ab" * 32}, {"m/other.json": "ab" * 32}, {"m/tokenizer.json": "AB"}])
def test_a_pin_names_a_model_a_file_and_a_hash(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="pinned_model_files"):
        FrontendSettings(pinned_model_files=wrong)
