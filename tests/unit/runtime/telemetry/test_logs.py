from __future__ import annotations

import json
import subprocess
import sys

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
