"""The shipped configuration of NATS and etcd is the one that the tests run under."""

from __future__ import annotations

import re
from pathlib import Path

from kvrouter.devtools.system.accounts import Namespace
from kvrouter.devtools.system.credentials import Credentials

SHIPPED = Path(__file__).parents[3] / "deploy" / "security"


def test_the_shipped_accounts_are_those_of_the_code(tmp_path: Path) -> None:
    made = Credentials(tmp_path / "certs", Namespace("kvrouter", ("workers",)), [("workers", 1)])
    config = re.sub(r"nkey: U[A-Z2-7]{55}", "nkey: PUBLIC_KEY", made.nats_config.read_text())
    assert (SHIPPED / "nats-accounts.conf").read_text() == config
    assert (SHIPPED / "etcd-accounts.sh").read_text() == made.etcd_script.read_text()


def test_no_secret_is_in_the_configuration_and_no_key_is_readable_by_others(tmp_path: Path) -> None:
    made = Credentials(tmp_path / "certs", Namespace("kvrouter", ("workers",)), [("workers", 1)])
    shown = made.nats_config.read_text() + made.etcd_script.read_text()
    for identity in made.identities.values():
        for path in (identity.nkey, identity.password, identity.certificate.key):
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.read_text().strip() not in shown
    assert made.folder.stat().st_mode & 0o777 == 0o700


def test_keys_and_passwords_are_kept_when_certificates_are_renewed(tmp_path: Path) -> None:
    namespace = Namespace("kvrouter", ("workers",))
    made = Credentials(tmp_path / "certs", namespace)
    scheduler = made.identities["scheduler"]
    kept = [path.read_text() for path in (scheduler.nkey, scheduler.password, made.root_password, made.nats_config)]
    certificate = scheduler.certificate.cert.read_text()
    Credentials(tmp_path / "certs", namespace)
    assert kept == [
        path.read_text() for path in (scheduler.nkey, scheduler.password, made.root_password, made.nats_config)
    ]
    assert certificate != scheduler.certificate.cert.read_text()
