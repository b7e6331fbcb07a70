"""Alert rules and the dashboard use metrics and labels that exist, and every alert is tested and documented."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from ..reference_pages import REFERENCE

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/kvrouter.rules.yml"
TESTS = ROOT / "deploy/prometheus/kvrouter.test.yml"
DASHBOARD = ROOT / "deploy/grafana/kvrouter.json"


def documented() -> dict[str, set[str]]:
    """Names of series with their labels, as the reference lists the metrics."""
    series = {}
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|", page, re.MULTILINE):
        suffixes = ("", "_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        series |= {f"{name}{suffix}": set(re.findall(r"`(\w+)`", labels)) for suffix in suffixes}
    return series


def used(text: str) -> set[str]:
    return set(re.findall(r"\bkvrouter_\w+", text))


def test_rules_and_dashboard_use_metrics_that_exist() -> None:
    known = documented().keys()
    assert used(RULES.read_text(encoding="utf-8"))
    for file in (RULES, TESTS, DASHBOARD):
        assert used(file.read_text(encoding="utf-8")) <= known, file


def test_labels_that_are_selected_exist() -> None:
    known = documented()
    selected = re.findall(r"(kvrouter_\w+)\{([^}]*)\}", RULES.read_text(encoding="utf-8"))
    assert selected
    for metric, selector in selected:
        assert set(re.findall(r"(\w+)(?:=|!=)", selector)) <= known[metric], metric


def test_every_alert_is_provoked_by_a_test_and_in_the_guide() -> None:
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text(encoding="utf-8"))
    assert len(alerts) == len(set(alerts)) > 20
    assert re.findall(r'alertname="(\w+)"', TESTS.read_text(encoding="utf-8")) == alerts
    guide = (ROOT / "docs/guides/monitor.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(Kvrouter\w+)`", guide)) == set(alerts)


def test_the_dashboard_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("dashboard", DASHBOARD.parent / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = DASHBOARD.read_text(encoding="utf-8")
    assert text == module.text(), "run `make reference`"
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_names_of_metrics_follow_the_rules_of_prometheus() -> None:
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE):
        assert name.endswith("_total") == (kind == "counter"), name
        assert not re.search(r"_(ms|us|milliseconds|minutes|mib|kib|mb|percent)(_|$)", name), f"{name}: no base unit"
