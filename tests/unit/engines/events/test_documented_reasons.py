"""Every reason for which events are left out is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
ENGINES = ROOT / "services" / "engines" / "src" / "kvrouter" / "engines"
REASON = re.compile(
    r'(?:UndecodableEvent\(|_LeftOut\(|_leave_out\(|left_out\[|\.lost\(|_lose\([^"]*?, )\s*"(\w+)"', re.DOTALL
)


@pytest.mark.parametrize(
    "source",
    [
        *(ENGINES / "events" / name for name in ("vllm_sglang_events.py", "translation.py", "tensorrt_llm.py")),
        ENGINES / "relay" / "rank_relay.py",
    ],
    ids=lambda source: source.stem,
)
def test_a_reason_is_documented(source: Path) -> None:
    page = (ROOT / "docs" / "reference" / "engine-events.md").read_text()
    reasons = set(REASON.findall(source.read_text()))
    assert reasons
    assert {reason for reason in reasons if f"`{reason}`" not in page} == set()
