"""Every option, metric and command that a deployment file names exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from kvrouter.devtools.system.accounts import Namespace
from kvrouter.devtools.system.credentials import Credentials
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.mocker.settings import MockerSettings
from kvrouter.relay.settings import RelaySettings
from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.sidecar.settings import SidecarSettings
from pydantic import BaseModel

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
TABLES: dict[str, type[BaseModel]] = {
    "frontend": FrontendSettings,
    "scheduler": SchedulerSettings,
    "indexer": IndexerSettings,
}
SETTINGS = (ServiceSettings, *TABLES.values(), SidecarSettings, RelaySettings, MockerSettings)
NOT_SETTINGS = {"KVROUTER_CORE", "KVROUTER_CONFIG"}
FILES = sorted(
    path for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".json"
)


def unknown_keys(options: dict[str, object]) -> set[str]:
    """Returns the keys of a configuration file that no service has."""
    common = {key for key in options if key not in TABLES}
    unknown = {key for key in common if not any(key in each.model_fields for each in TABLES.values())}
    for table, settings in TABLES.items():
        keys = options.get(table, {})
        assert isinstance(keys, dict)
        unknown |= {f"{table}.{key}" for key in keys if key not in settings.model_fields}
    return unknown


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_variables_are_options(path: Path) -> None:
    known = {f"KVROUTER_{name.upper()}" for settings in SETTINGS for name in settings.model_fields}
    named = set(re.findall(r"\bKVROUTER_[A-Z][A-Z0-9_]*\b", path.read_text()))
    assert named <= known | NOT_SETTINGS


def test_the_configuration_file_has_known_options() -> None:
    assert not unknown_keys(tomllib.loads((DEPLOY / "kvrouter.toml").read_text()))


def test_an_unknown_option_would_be_found() -> None:
    assert unknown_keys({"etcdd": "", "frontend": {"portt": 1}, "nats": ""}) == {"etcdd", "frontend.portt"}


def test_the_chart_sets_known_options() -> None:
    template = (DEPLOY / "helm/kvrouter/templates/config.yaml").read_text()
    named = set(re.findall(r'"([a-z_]+)" (?:"0\.0\.0\.0|\d)', template))
    named |= set(re.findall(r'set (?:\$top|\(get \$fixed "frontend"\)) "([a-z_]+)"', template))
    assert {"bind", "http_bind", "host", "port", "tls_cert_file", "api_keys"} <= named
    assert named <= set(FrontendSettings.model_fields)


def test_commands_are_installed() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    scripts = set(project["scripts"])
    unit = (DEPLOY / "kvrouter@.service").read_text()
    (pattern,) = re.findall(r"^ExecStart=/opt/kvrouter/bin/(\S+)", unit, re.MULTILINE)
    (instances,) = re.findall(r"^# systemctl enable --now (.*)", unit, re.MULTILINE)
    assert {pattern.replace("%i", each.partition("@")[2]) for each in instances.split()} <= scripts
    assert {f"kvrouter-{table}" for table in TABLES} <= scripts


def test_the_chart_has_the_version_of_the_release() -> None:
    chart = (DEPLOY / "helm/kvrouter/Chart.yaml").read_text()
    version = (ROOT / "VERSION").read_text().strip()
    assert re.findall(r"^(?:version|appVersion): (.*)$", chart, re.MULTILINE) == [version, version]


def test_the_autoscaler_uses_an_exported_metric() -> None:
    template = (DEPLOY / "helm/kvrouter/templates/frontend.yaml").read_text()
    (metric,) = re.findall(r"metric: \{name: (\w+)\}", template)
    assert f"`{metric}`" in (ROOT / "docs/reference/metrics.md").read_text()


def test_a_stopping_service_may_drain() -> None:
    drain = FrontendSettings.model_fields["drain_seconds"].default
    (unit,) = re.findall(r"^TimeoutStopSec=(\d+)", (DEPLOY / "kvrouter@.service").read_text(), re.MULTILINE)
    (compose,) = re.findall(r"stop_grace_period: (\d+)s", (DEPLOY / "compose.yaml").read_text())
    assert int(unit) > drain
    assert int(compose) > drain


def test_the_secure_units_give_each_service_its_own_files_as_the_command_writes_them(tmp_path: Path) -> None:
    drop_in = (DEPLOY / "security/kvrouter@.service.d/secure.conf").read_text()
    loaded = dict(re.findall(r"^LoadCredential=([^:]+):/etc/kvrouter/certs/(.+)$", drop_in, re.MULTILINE))
    given = re.findall(r"^Environment=KVROUTER_([A-Z_]+)=(.+)$", drop_in, re.MULTILINE)
    assert {value.removeprefix("%d/") for _, value in given if value.startswith("%d/")} == set(loaded)
    credentials = Credentials(tmp_path / "certs", Namespace("kvrouter", ("workers",)))
    for name in TABLES:
        files = {key: credentials.folder / path.replace("%i", name) for key, path in loaded.items()}
        options = {
            option.lower(): str(files[value.removeprefix("%d/")]) if value.startswith("%d/") else value
            for option, value in ((option, value.replace("%i", name)) for option, value in given)
        }
        flags = credentials.identities[name].options()
        expected = {
            flag.removeprefix("--").replace("-", "_"): value
            for flag, value in zip(flags[::2], flags[1::2], strict=True)
        }
        assert options == {option: value for option, value in expected.items() if option != "tls_client_auth"}
