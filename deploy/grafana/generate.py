"""Writes kvrouter.json, the Grafana dashboard, from the panels below. `make reference` runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).parent / "kvrouter.json"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24


class Panel(NamedTuple):
    """A graph over time."""

    title: str
    unit: str
    """Unit in the names of Grafana."""
    queries: dict[str, str]
    """PromQL by legend."""
    description: str = ""
    is_signed: bool = False
    """Whether values may be below 0."""


def _quantile(share: int, metric: str, by: str = "") -> str:
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile(0.{share}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))"


def _quantiles(metric: str) -> dict[str, str]:
    return {f"{{{{model}}}} p{share}": _quantile(share, metric, "model") for share in (50, 99)}


def _rate(metric: str, by: str) -> dict[str, str]:
    return {f"{{{{{by}}}}}": f"sum by ({by}) (rate({metric}[$__rate_interval]))"}


def _by_rank(metric: str) -> dict[str, str]:
    by = "component, worker_id, dp_rank"
    return {"{{component}} {{worker_id}}:{{dp_rank}}": f"max by ({by}) ({metric})"}


_TOKENS = "sum by (model) (rate(kvrouter_frontend_{}_tokens_total[$__rate_interval]))"
_AUDITED = "sum by (model) (rate(kvrouter_scheduler_{}_cached_blocks_total[$__rate_interval]))"
_PROMPT = _TOKENS.format("prompt")

ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel("Requests", "reqps", _rate("kvrouter_frontend_requests_total", "code"), "By gRPC code."),
        Panel("Time to first token", "s", _quantiles("kvrouter_frontend_ttft_seconds")),
        Panel("Inter-token latency", "s", _quantiles("kvrouter_frontend_inter_token_seconds")),
        Panel("Whole request", "s", _quantiles("kvrouter_frontend_request_seconds")),
        Panel(
            "Running and queued",
            "short",
            {
                "running": "sum(kvrouter_frontend_requests_in_flight)",
                "queued in {{component}}": "sum by (component) (kvrouter_scheduler_queue_length)",
            },
        ),
        Panel(
            "Retries and failures of workers",
            "ops",
            _rate("kvrouter_frontend_worker_failures_total", "cause")
            | {"retries": "sum(rate(kvrouter_frontend_retries_total[$__rate_interval]))"},
        ),
    ],
    "Cache": [
        Panel(
            "Hit rate",
            "percentunit",
            {
                "{{model}} found": f"{_TOKENS.format('cached')} / {_PROMPT}",
                "{{model}} predicted": f"{_TOKENS.format('predicted_cached')} / {_PROMPT}",
            },
            "Share of prompt tokens that workers found in their caches, and that the Scheduler had predicted.",
        ),
        Panel(
            "Prompt tokens saved", "short", {"{{model}}": _TOKENS.format("cached")}, "Tokens per second not computed."
        ),
        Panel("Predictions", "ops", _rate("kvrouter_scheduler_predictions_total", "verdict")),
        Panel(
            "Error of predictions",
            "percentunit",
            {"{{model}}": f"{_AUDITED.format('predicted')} / {_AUDITED.format('actual')} - 1"},
            "Predicted over reported cached blocks, less 1. Above 0 the index promises more than engines reuse.",
            is_signed=True,
        ),
        Panel(
            "Prompt tokens loaded from lower tiers",
            "short",
            {
                f"{{{{model}}}} {{{{tier}}}} {by}": (
                    "sum by (model, tier) "
                    f'(rate(kvrouter_scheduler_audited_tier_tokens_total{{source="{by}"}}[$__rate_interval]))'
                )
                for by in ("reported", "predicted")
            },
            "Tokens per second from host memory, disk and shared storage.",
        ),
    ],
    "Routing": [
        Panel(
            "Added by the router",
            "s",
            {
                f"{part} p99": _quantile(99, metric)
                for part, metric in (
                    ("arrival to dispatch", "kvrouter_frontend_added_seconds"),
                    ("selection", "kvrouter_scheduler_select_seconds"),
                    ("index", "kvrouter_indexer_find_matches_seconds"),
                )
            },
        ),
        Panel(
            "Time in the queue",
            "s",
            {
                "p99": _quantile(99, "kvrouter_scheduler_queued_seconds"),
                "oldest in {{component}}": "max by (component) (kvrouter_scheduler_queued_oldest_seconds)",
            },
        ),
        Panel(
            "Selections on load alone",
            "ops",
            _rate("kvrouter_scheduler_load_only_total", "reason"),
            "The index was not available in time.",
        ),
    ],
    "Load of the ranks": [
        Panel(
            "Active blocks",
            "short",
            _by_rank("kvrouter_scheduler_active_blocks"),
        ),
        Panel(
            "Prompt tokens to compute",
            "short",
            _by_rank("kvrouter_scheduler_prefill_tokens"),
        ),
        Panel(
            "Requests",
            "short",
            _by_rank("kvrouter_scheduler_active_requests"),
        ),
    ],
    "Index": [
        Panel("Event lag", "s", {"{{component}}": "max by (component) (kvrouter_indexer_lag_seconds)"}),
        Panel("Events", "ops", _rate("kvrouter_indexer_events_total", "outcome")),
        Panel(
            "Ranks in trouble",
            "short",
            {
                "silent": "sum(kvrouter_indexer_silent_ranks)",
                "stale": "sum(kvrouter_indexer_stale_ranks)",
                "unverified": "sum(kvrouter_indexer_unverified_ranks)",
                "waiting for a resync": "sum(kvrouter_indexer_resyncs_pending)",
            },
        ),
    ],
    "Health": [
        Panel(
            "Fill level of bounds",
            "percentunit",
            {"{{instance}} {{bound}}": "kvrouter_bound_used / kvrouter_bound_limit"},
            "Bounds that evict, such as caches, are full by design.",
        ),
        Panel(
            "Workers",
            "short",
            {
                "live": "max(kvrouter_directory_workers)",
                "frozen": "max(kvrouter_frontend_suspected_workers)",
                "stalled": "max(kvrouter_frontend_stalled_workers)",
                "failing": "max(kvrouter_frontend_backed_off_workers)",
            },
        ),
        Panel(
            "NATS and etcd",
            "short",
            {
                "{{instance}} connected to NATS": "kvrouter_nats_connected",
                "{{instance}} age of registrations, s": "kvrouter_directory_age_seconds",
            },
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Returns the dashboard."""
    panels: list[dict[str, Any]] = []
    top = 0
    for heading, row in ROWS.items():
        panels.append({"type": "row", "title": heading, "gridPos": _place(0, top, _COLUMNS, 1), "panels": []})
        top += 1
        for index, panel in enumerate(row):
            left, line = index * _WIDTH % _COLUMNS, index * _WIDTH // _COLUMNS
            panels.append(_graph(panel, _place(left, top + line * _HEIGHT, _WIDTH, _HEIGHT)))
        top += -(-len(row) * _WIDTH // _COLUMNS) * _HEIGHT
    return {
        "title": "kvrouter",
        "uid": "kvrouter",
        "tags": ["kvrouter"],
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def text() -> str:
    """Returns the content of the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def _from(panel: Panel) -> dict[str, int]:
    return {} if panel.is_signed else {"min": 0}


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _graph(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit} | _from(panel), "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


if __name__ == "__main__":
    DASHBOARD.write_text(text(), encoding="utf-8")
