"""One family of errors: a class for each reason, one name for each class."""

from __future__ import annotations

import ast
import pickle
import re
from collections import Counter
from pathlib import Path

import grpc
import pytest
from kvrouter.v1 import errors
from kvrouter.v1.error_encoding import from_parts, to_parts
from kvrouter.v1.errors import AllBusy, DependencyAway, KvRouterError, ServiceRefused, WorkerLost
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason

ROOT = Path(__file__).parents[3]
CODES = {code.value[0]: code for code in grpc.StatusCode}
DEVELOPMENT = {"mocker", "devtools", "simulator"}


def classes(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def module_file(module: str) -> Path:
    relative = module.replace(".", "/")
    (file,) = (
        path
        for pattern in (f"*/src/{relative}.py", f"services/*/src/{relative}.py", f"*/src/{relative}/__init__.py")
        for path in ROOT.glob(pattern)
    )
    return file


def test_classes_of_the_public_contract_have_unique_names() -> None:
    listed = re.findall(r"automodule:: (\S+)", (ROOT / "docs" / "api" / "index.rst").read_text(encoding="utf-8"))
    assert "kvrouter.v1.errors" in listed
    files = {module_file(module) for module in listed}
    files |= {
        path
        for path in (*ROOT.glob("*/src/**/errors.py"), *ROOT.glob("services/*/src/**/errors.py"))
        if not DEVELOPMENT & set(path.parts)
    }
    names = Counter(name for path in files for name in classes(path))
    assert [name for name, files_with_it in names.items() if files_with_it > 1] == []


@pytest.mark.parametrize("reason", ErrorReason.keys()[1:])
def test_every_reason_has_a_class(reason: str) -> None:
    error = from_parts(grpc.StatusCode.ABORTED.value[0], "m", ErrorInfo(reason=ErrorReason.Value(reason)))
    assert type(error).defaults.reason == ErrorReason.Value(reason)
    assert type(error).__name__ in vars(errors)
    assert error.reason == reason.removeprefix("ERROR_REASON_")


def test_a_message_that_has_the_advice_already_is_restored_without_it() -> None:
    error = AllBusy(1500)
    code, _, info = to_parts(error)
    restored = from_parts(code, str(error), info)
    assert vars(restored) == vars(error) | {"code": CODES[code]}
    assert (restored.message, str(restored)) == (error.message, str(error))


def test_an_error_can_be_pickled() -> None:
    error = WorkerLost(7, "gone")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - its own
    assert (type(copy), str(copy), copy.code, copy.info, copy.worker_id) == (
        WorkerLost,
        str(error),
        error.code,
        error.info,
        7,
    )


def test_a_reason_of_a_newer_service_is_kept_as_its_number() -> None:
    error = from_parts(grpc.StatusCode.UNAVAILABLE.value[0], "m", ErrorInfo.FromString(b"\x08\xe7\x07"))
    assert (type(error), error.code, error.reason) == (DependencyAway, grpc.StatusCode.UNAVAILABLE, "999")
    unknown = from_parts(grpc.StatusCode.ABORTED.value[0], "m", ErrorInfo.FromString(b"\x08\xe7\x07"))
    assert (type(unknown), unknown.reason) == (KvRouterError, "999")


def test_a_service_that_does_not_admit_this_process_is_unavailable() -> None:
    refusal = ServiceRefused("expected the token", code=grpc.StatusCode.PERMISSION_DENIED)
    assert to_parts(refusal)[0] == grpc.StatusCode.PERMISSION_DENIED.value[0]
    assert from_parts(*to_parts(refusal)).code is grpc.StatusCode.UNAVAILABLE


def test_what_an_error_says_itself_takes_the_place_of_what_its_class_says() -> None:
    error = errors.NotReady("restoring", 20, advice="Wait.")
    assert (error.info.retry_after_ms, error.advice, error.retry_elsewhere) == (20, "Wait.", True)
    assert errors.NotReady.defaults.retry_after_ms == 500
    assert str(errors.Draining()) == "the service is stopping. Use another replica."
