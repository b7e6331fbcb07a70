"""The reference agrees with the code: options, metrics, calls, errors, keys and subjects."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvrouter.frontend.service import FrontendService
from kvrouter.indexer.api.service import IndexerService
from kvrouter.runtime.config.stored_help import PAGES
from kvrouter.scheduler.api.service import SchedulerService
from kvrouter.v1 import frontend_pb2, indexer_pb2, scheduler_pb2, worker_pb2
from kvrouter.v1.error_encoding import HTTP_STATUS, http_status
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.names import ComponentName, service_key, threshold_key, worker_deaths_subject

from ..reference_pages import REFERENCE, TYPES, named, rows, section

ROOT = Path(__file__).parents[2]
SERVICES = {
    name: module.DESCRIPTOR.services_by_name[name]
    for name, module in (
        ("FrontendService", frontend_pb2),
        ("SchedulerService", scheduler_pb2),
        ("IndexerService", indexer_pb2),
        ("WorkerService", worker_pb2),
    )
}


def generator(page: str) -> Any:
    source = REFERENCE / f"generate_{page}.py"
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["options", "metrics", "dependencies", "compatibility"])
def test_generated_pages_are_up_to_date(page: str) -> None:
    written = (REFERENCE / f"{page}.md").read_text(encoding="utf-8")
    assert generator(page).page() == written, f"docs/reference/{page}.md is out of date: run make reference"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse writes help in another form")
def test_stored_help_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pages = generator("options").help_pages()
    assert set(pages) == set(PAGES.iterdir())
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: run make reference"


@pytest.mark.parametrize("option", ["--kv-events", "--model", "--block-size"])
def test_an_option_without_a_default_is_required(option: str) -> None:
    lines = (REFERENCE / "options.md").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith(f"| `{option}` |") and "| required |" in line for line in lines)


@pytest.mark.parametrize("service", SERVICES)
def test_every_call_is_in_the_contract_page(service: str) -> None:
    listed = re.findall(rf"`{service}\.(\w+)`", (REFERENCE / "contract.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(method.name for method in SERVICES[service].methods)


@pytest.mark.parametrize("service", SERVICES)
def test_every_call_has_its_errors(service: str) -> None:
    listed = [row[0].strip("`") for row in rows(section("errors.md", service))]
    assert sorted(listed) == sorted(method.name for method in SERVICES[service].methods)


def test_every_error_type_is_described_as_it_is() -> None:
    described = {row[0].strip("`"): row[1:5] for row in rows(section("errors.md", "Error types"))}
    assert described == {name: list(as_described(kind)) for name, kind in TYPES.items()}


def as_described(kind: type[KvRouterError]) -> Iterator[str]:
    yield kind.code.name
    reason = ErrorReason.Name(kind.defaults.reason).removeprefix("ERROR_REASON_")
    yield "-" if reason == "UNSPECIFIED" else reason
    yield str(http_status(kind.code, kind.defaults.reason))
    values = {"str": "x", "int": 1, "object": "x"}
    parameters = inspect.signature(kind).parameters.values()
    needed = [values[str(each.annotation)] for each in parameters if each.default is inspect.Parameter.empty]
    yield "yes" if kind(*needed).info.HasField("retry_after_ms") else "no"


def made_in(folder: str) -> set[str]:
    """The error types that are made somewhere in the sources of a service."""
    return {
        made.id
        for path in (ROOT / "services" / folder / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for made in (getattr(node, "func", None), getattr(node, "exc", None))
        if isinstance(made, ast.Name) and made.id in TYPES
    }


ANY_CALL = named(section("errors.md", "Any call"))


@pytest.mark.parametrize(("service", "folder"), [("SchedulerService", "scheduler"), ("IndexerService", "indexer")])
def test_every_error_of_a_service_is_listed_for_a_call(service: str, folder: str) -> None:
    listed = named(section("errors.md", service))
    made = made_in(folder)
    assert made <= listed | ANY_CALL, "errors that the page lacks"
    assert listed - ANY_CALL <= made, "errors that the service does not raise"


@pytest.mark.parametrize("kind", [FrontendService, SchedulerService, IndexerService])
def test_the_errors_of_a_call_are_those_of_its_docstring(kind: type) -> None:
    for call, types, *_ in rows(section("errors.md", kind.__name__)):
        method = re.sub(r"(?<!^)(?=[A-Z])", "_", call.strip("`")).lower()
        raised = inspect.cleandoc(getattr(kind, method).__doc__).partition("Raises:")[2]
        of_the_call = types.partition(". A selection in it")[0]
        assert set(re.findall(r"\w+", raised)) & set(TYPES) == named(of_the_call), call


def test_every_error_of_the_frontend_is_listed_for_a_call() -> None:
    listed = named(section("errors.md", "FrontendService"))
    made = made_in("frontend")
    peers = ("SchedulerService", "IndexerService")
    passed_on = {"OutOfRange"}.union(*(named(section("errors.md", peer)) for peer in peers))
    assert made <= listed | ANY_CALL, "errors that the page lacks"
    assert listed - ANY_CALL <= made | passed_on, "errors that the Frontend does not raise"


def test_every_error_of_the_server_can_happen_to_any_call() -> None:
    path = ROOT / "services" / "runtime" / "src" / "kvrouter" / "runtime" / "rpc" / "server.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & set(TYPES) <= ANY_CALL


def test_every_refusal_of_the_sdk_is_listed() -> None:
    listed = section("errors.md", "WorkerService")
    source = ROOT / "services" / "publisher_sdk" / "src" / "kvrouter" / "publisher"
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                if node.value.attr == "StatusCode":
                    assert node.attr in listed
            elif isinstance(node, ast.Attribute) and node.attr.startswith("ERROR_REASON_"):
                reason = node.attr.removeprefix("ERROR_REASON_")
                assert reason == "UNSPECIFIED" or f"({reason})" in listed


def test_http_statuses_are_those_of_the_page() -> None:
    listed = set(re.findall(r"\b[2-5]\d\d\b", (REFERENCE / "errors.md").read_text(encoding="utf-8")))
    assert {str(status) for status in HTTP_STATUS.values()} <= listed


def test_names_are_those_of_the_code() -> None:
    component = ComponentName("NS", "C")
    worker, rank = 0xABC, 3
    ids = {"0000000000000abc": "W", ".W.3": ".W.R", "KIND/ID": "KIND/ID"}
    names = {
        *(component.descriptor_key, component.worker_key(worker), component.incarnation_key(worker)),
        component.drain_key(worker),
        *(component.applied_key("ID"), component.snapshot_key, component.snapshot_lock_key),
        *(service_key("NS", "KIND", "ID"), threshold_key("NS", "MODEL")),
        *(component.events_subject(worker, rank), component.live_subject(worker, rank)),
        *(component.load_subject(worker, rank), component.sync_subject, component.sync_state_subject("ID")),
        *(component.stream, component.snapshot_bucket.replace("__2_", "__LEN_")),
        worker_deaths_subject("NS"),
    }
    for found, written in ids.items():
        names = {name.replace(found, written) for name in names}
    page = (REFERENCE / "names.md").read_text(encoding="utf-8")
    listed = {name for name in re.findall(r"`([^`]+)`", page) if name.startswith(("/kvrouter/", "kvrouter."))}
    streams = {name for name in re.findall(r"`([^`]+)`", page) if name.startswith("kvrouter-v1")}
    assert listed | streams == names
