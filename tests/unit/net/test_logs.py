"""Libraries that an engine links do not write to its standard output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging, sys
from kvrouter.net.logs import get_logger
log = get_logger("kvrouter.publisher.test")
log.info("publish.quiet", rank=1)
log.warning("publish.loud", rank=2)
{then}
"""
CONFIGURED_LOGGING = """
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
log.info("publish.shown", rank=3)
"""
CONFIGURED_STRUCTLOG = """
import structlog
structlog.configure(processors=[structlog.processors.JSONRenderer()])
log.info("publish.json", rank=4)
"""


def run(then: str = "") -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(then=then)], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout, done.stderr


def test_an_unconfigured_process_sees_warnings_on_standard_error() -> None:
    assert run() == ("", "event='publish.loud' rank=2\n")


def test_the_configuration_of_logging_applies() -> None:
    out, err = run(CONFIGURED_LOGGING)
    assert out == ""
    assert err.endswith("kvrouter.publisher.test INFO event='publish.shown' rank=3\n")


def test_the_configuration_of_structlog_applies() -> None:
    out, _ = run(CONFIGURED_STRUCTLOG)
    assert out == '{"rank": 4, "event": "publish.json"}\n'


def test_no_library_logs_by_itself() -> None:
    root = Path(__file__).parents[3]
    libraries = ("protos", "core", "net", "services/publisher_sdk")
    sources = [path for library in libraries for path in (root / library / "src").rglob("*.py")]
    own = [path for path in sources if path.name != "logs.py" and "structlog.get_logger" in path.read_text()]
    assert [str(path) for path in own] == []
