"""The secured sample for compose gives each container what it needs of `kvrouter certs`, and nothing of the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvrouter.devtools.system.accounts import Namespace
from kvrouter.devtools.system.credentials import Credentials
from kvrouter.frontend.access.key_file import KeyFile, write_key_file
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.mocker.settings import MockerSettings
from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.runtime.config.sources import read_all
from kvrouter.scheduler.settings import SchedulerSettings

DEPLOY = Path(__file__).parents[3] / "deploy"
PLAIN = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
SECURE = yaml.safe_load((DEPLOY / "compose.secure.yaml").read_text())
SERVICES: dict[str, tuple[str, type[ServiceSettings]]] = {
    "indexer": ("indexer", IndexerSettings),
    "scheduler": ("scheduler", SchedulerSettings),
    "frontend": ("frontend", FrontendSettings),
    "worker-1": ("worker-0000000000000001", MockerSettings),
    "worker-2": ("worker-0000000000000002", MockerSettings),
}


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    folder = tmp_path_factory.mktemp("compose") / "certs"
    made = Credentials(folder, Namespace("kvrouter", ("workers",)), [("workers", 1), ("workers", 2)])
    write_key_file(folder / "api-keys.json", KeyFile())
    return made


def mounted(service: str) -> dict[str, str]:
    """Returns the file of each secret of a service, by its path in the container."""
    return {
        f"/run/secrets/{each['target']}": SECURE["secrets"][each["source"]]["file"]
        for each in SECURE["services"][service]["secrets"]
    }


def settings(service: str, folder: Path) -> Any:
    """Returns the settings of a service with the environment of both files, as compose merges them.

    Its secrets are where the command wrote them.
    """
    environment = PLAIN[service]["environment"] | SECURE["services"][service]["environment"]
    files = {path: str(folder / Path(file).name) for path, file in mounted(service).items()}
    (read,) = read_all(
        [SERVICES[service][1]], [], {name: files.get(value, value) for name, value in environment.items()}
    )
    return read


def test_every_container_is_secured_and_runs_as_the_owner_of_its_files() -> None:
    assert set(SECURE["services"]) == set(PLAIN) | {"accounts"}
    assert all(each["user"].startswith("${OWNER:?") for each in SECURE["services"].values())


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_has_the_options_and_the_files_of_its_account_only(service: str, credentials: Credentials) -> None:
    account, kind = SERVICES[service]
    chosen = settings(service, credentials.folder)
    flags = credentials.identities[account].options()
    for flag, expected in zip(flags[::2], flags[1::2], strict=True):
        assert getattr(chosen, flag.removeprefix("--").replace("-", "_")) == expected
    is_worker = kind is MockerSettings
    token = "service-token.digest" if is_worker else "service-token"
    assert chosen.service_token_file == str(credentials.folder / token)
    own = {f"./certs/{account}.{kind}" for kind in ("crt", "key", "nkey", "etcd-password")}
    keys = {"./certs/api-keys.json"} if service == "frontend" else set()
    assert set(mounted(service).values()) == own | {"./certs/ca.crt", f"./certs/{token}"} | keys
    assert chosen.etcd.startswith("https://etcd:")
    assert chosen.nats.startswith("tls://nats:")


def test_the_frontend_asks_for_keys_of_the_api(credentials: Credentials) -> None:
    assert settings("frontend", credentials.folder).api_keys == str(credentials.folder / "api-keys.json")


@pytest.mark.parametrize("service", ["worker-1", "worker-2"])
def test_a_worker_has_the_id_and_the_address_of_its_account(service: str, credentials: Credentials) -> None:
    chosen = settings(service, credentials.folder)
    assert f"worker-{chosen.worker_id:016x}" == SERVICES[service][0]
    assert chosen.advertise == service


@pytest.mark.parametrize("server", ["nats", "etcd"])
def test_a_server_has_its_own_certificate_only(server: str) -> None:
    assert set(mounted(server).values()) == {f"./certs/{name}" for name in ("ca.crt", f"{server}.crt", f"{server}.key")}
    text = (DEPLOY / "security/nats-server.conf").read_text() + " ".join(SECURE["services"]["etcd"]["command"])
    assert all(text.count(path) == 2 for path in mounted(server))


def test_every_file_is_one_that_the_commands_write(credentials: Credentials) -> None:
    named = [each["file"] for kind in ("secrets", "configs") for each in SECURE[kind].values()]
    written = {f"./certs/{path.name}" for path in credentials.folder.iterdir()}
    assert set(named) <= written | {"./security/nats-server.conf"}
    head = (DEPLOY / "compose.secure.yaml").read_text().partition("x-secured")[0]
    assert "--file certs/api-keys.json" in head
    assert (credentials.folder / Path(SECURE["services"]["accounts"]["command"][1]).name).is_file()


def test_the_secrets_reach_neither_the_repository_nor_an_image() -> None:
    assert "/deploy/certs/" in (DEPLOY.parent / ".gitignore").read_text().splitlines()
    assert "deploy/certs" in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()


def test_nats_stores_messages_where_it_may_write() -> None:
    (folder,) = re.findall(r'store_dir: "(.*)"', (DEPLOY / "security/nats-server.conf").read_text())
    assert any(Path(folder).is_relative_to(each) for each in PLAIN["nats"]["tmpfs"]), folder
