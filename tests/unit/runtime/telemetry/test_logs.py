from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

SCRIPT = """
import logging, structlog
from kvrouter.runtime.telemetry import logs
log = structlog.get_logger()
logs.configure("info", "json", "tester")
log.debug("unseen")
log.info("started", port=1)
from kvrouter.net import trace_context
with trace_context.entered("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"):
    log.info("traced")
structlog.get_logger(component="other").warning("line\\nbreak")
logging.getLogger("library").warning("said %s", "so")
def fail(prompt):
    raise ValueError("failed")
try:
    fail("secret tokens " + "of the prompt")
except ValueError:
    log.exception("oops")
"""


def test_each_event_is_one_line_of_json_without_local_variables() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "secret tokens of the prompt" not in done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    traced = lines.pop(1)
    assert (traced["event"], traced["trace_id"]) == ("traced", "0af7651916cd43dd8448eb211c80319c")
    assert traced["span_id"] == "b7ad6b7169203331"
    assert not any("trace_id" in line for line in lines)
    assert [line["event"] for line in lines] == ["started", "line\nbreak", "said so", "oops"]
    assert [line["component"] for line in lines] == ["tester", "other", "tester", "tester"]
    assert [line["level"] for line in lines] == ["info", "warning", "warning", "error"]
    assert lines[0]["port"] == 1
    assert lines[2]["logger"] == "library"
    assert "ValueError: failed" in lines[3]["exception"]
    assert all("time" in line for line in lines)


TERMINAL_SCRIPT = """
import structlog
from kvrouter.runtime.telemetry import logs
logs.configure()
structlog.get_logger().info("started", port=1)
"""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_at_a_terminal_are_for_people(is_terminal: bool) -> None:
    reader, writer = pty.openpty() if is_terminal else os.pipe()
    subprocess.run([sys.executable, "-c", TERMINAL_SCRIPT], stderr=writer, check=True)
    os.close(writer)
    line = os.read(reader, 10_000).decode()
    os.close(reader)
    assert "started" in line
    assert line.startswith("{") is not is_terminal


HOSTILE_SCRIPT = """
import logging, sys, structlog
from kvrouter.runtime.telemetry import logs
logs.configure("info", sys.argv[1], "tester")
hostile = "a\\x1b[31m\\u202eb\\nforged line\\r"
structlog.get_logger().info("named", name=hostile, names={hostile: [hostile]})
logging.getLogger("library").warning(hostile)
try:
    raise ValueError(hostile)
except ValueError:
    structlog.get_logger().exception("oops")
"""


@pytest.mark.parametrize("format", ["json", "console"])
def test_names_with_escape_sequences_and_line_ends_stay_text(format: str) -> None:  # noqa: A002
    command = [sys.executable, "-c", HOSTILE_SCRIPT, format]
    lines = subprocess.run(command, capture_output=True, check=True).stderr.decode().removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in lines)
    assert sum(line.startswith("forged") for line in lines) == (format == "console"), "in the traceback only"
