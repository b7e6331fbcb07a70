"""Creates the secrets of a system for development: certificates, keys, passwords, and configuration of the servers."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nkeys
from kvrouter.net.auth.service_token import digest_line, worker_token
from kvrouter.net.etcd import EtcdAccess
from kvrouter.net.nats.access import NatsAccess
from kvrouter.net.tls import Tls, TlsOptions

from .accounts import Account, Namespace, etcd_commands, nats_accounts
from .certificates import LOOPBACK, PEER_DOMAIN, CertificatePaths, DevelopmentAuthority, write_file

SERVICES = ("frontend", "scheduler", "indexer")
ROOT = "root"
"""User that administers etcd."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The files of one account."""

    account: Account
    certificate: CertificatePaths
    nkey: Path
    password: Path

    def options(self) -> tuple[str, ...]:
        """Returns the flags with which a service uses them."""
        clients = "none" if self.account.role == "frontend" else "required"
        return (
            *("--tls-cert-file", str(self.certificate.cert), "--tls-key-file", str(self.certificate.key)),
            *("--tls-ca-file", str(self.certificate.authority), "--tls-peer-domain", PEER_DOMAIN),
            *("--tls-client-auth", clients),
            *("--nats-nkey-file", str(self.nkey), "--nats-inbox-prefix", self.account.inbox_prefix),
            *("--etcd-user", self.account.name, "--etcd-password-file", str(self.password)),
        )


class Credentials:
    """All secrets of a namespace, in one folder. Existing keys and passwords are kept; certificates are renewed."""

    def __init__(
        self,
        folder: Path,
        namespace: Namespace,
        workers: Iterable[tuple[str, int]] = (),
        *,
        hosts: Sequence[str] = LOOPBACK,
        days: float = 365,
    ) -> None:
        """Creates what is missing.

        Args:
            folder: Where the files are; created with mode 0700.
            namespace: The namespace, with the components that Indexers and Schedulers serve.
            workers: Component and id of each worker that gets an identity.
            hosts: Host names and addresses in the certificates.
            days: Validity of the certificates.

        Raises:
            ValueError: the folder has a key that is not one of this authority.
        """
        self.authority = DevelopmentAuthority(folder, days=days)
        self.folder = folder
        self.namespace = namespace
        self._hosts = hosts
        accounts = [Account(role) for role in (*SERVICES, "admin")]
        accounts += [Account("worker", worker_id, component) for component, worker_id in workers]
        self.identities = {account.name: self._identity(account) for account in accounts}
        self.servers = {name: self.authority.issue(name, hosts) for name in ("nats", "etcd")}
        self.root_password = self._password(ROOT)
        """Password file of the user that administers etcd."""
        self.nats_config = folder / "nats-accounts.conf"
        """Accounts and users of NATS, to include in nats-server's configuration. It has no secrets."""
        self.etcd_script = folder / "etcd-accounts.sh"
        """Creates the users of etcd and turns authentication on."""
        self._service_token()
        self._salt_key()
        public = [(each.account, _public_key(each.nkey)) for each in self.identities.values()]
        write_file(self.nats_config, nats_accounts(public, namespace).encode(), 0o644)
        write_file(self.etcd_script, self._etcd_script().encode(), 0o755)

    def admin_tls(self) -> Tls:
        """Returns TLS with which an administrator reaches every service."""
        paths = self.identities["admin"].certificate
        return Tls(TlsOptions(str(paths.cert), str(paths.key), str(paths.authority), peer_domain=PEER_DOMAIN))

    def etcd_access(self, name: str, endpoints: str) -> EtcdAccess:
        """Returns the access of an identity to etcd."""
        identity = self.identities[name]
        return EtcdAccess(endpoints, user=name, password_file=str(identity.password), tls=self._plain_tls(identity))

    def nats_access(self, name: str, urls: str) -> NatsAccess:
        """Returns the access of an identity to NATS."""
        identity = self.identities[name]
        prefix = identity.account.inbox_prefix
        return NatsAccess(urls, nkey_file=str(identity.nkey), inbox_prefix=prefix, tls=self._plain_tls(identity))

    def _plain_tls(self, identity: Identity) -> Tls:
        paths = identity.certificate
        return Tls(TlsOptions(str(paths.cert), str(paths.key), str(paths.authority)))

    def _identity(self, account: Account) -> Identity:
        # The role is in the certificate; the file has the account's name.
        certificate = self.authority.issue(account.name, self._hosts, role=account.role)
        return Identity(account, certificate, self._nkey(account.name), self._password(account.name))

    def _nkey(self, name: str) -> Path:
        path = self.folder / f"{name}.nkey"
        if not path.exists():
            write_file(path, bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)), 0o600)
        return path

    def _password(self, name: str) -> Path:
        path = self.folder / f"{name}.etcd-password"
        if not path.exists():
            write_file(path, secrets.token_urlsafe(24).encode(), 0o600)
        return path

    def _service_token(self) -> None:
        """Creates the token that services show each other, and the digest with which workers recognize theirs."""
        path = self.folder / "service-token"
        if not path.exists():
            write_file(path, secrets.token_hex(32).encode(), 0o600)
        digest = digest_line(worker_token(path.read_text().strip()))
        write_file(self.folder / "service-token.digest", f"{digest}\n".encode(), 0o600)

    def _salt_key(self) -> None:
        """Creates the secret that keys the salts of caches, for all Frontends."""
        path = self.folder / "cache-salt.key"
        if not path.exists():
            write_file(path, f"{secrets.token_hex(32)}\n".encode(), 0o600)

    def _etcd_script(self) -> str:
        lines = [
            "#!/bin/sh",
            "# Creates the users of kvrouter in etcd, with rights on their own keys, and turns authentication on.",
            "# Run it once: ETCDCTL_ENDPOINTS=https://HOST:2379 ETCDCTL_CACERT=ca.crt \\",
            "#   ETCDCTL_CERT=admin.crt ETCDCTL_KEY=admin.key sh etcd-accounts.sh",
            "set -eu",
            'cd "$(dirname "$0")"',
            "ctl=${ETCDCTL:-etcdctl}",
            f'"$ctl" user add {ROOT} --interactive=false < {ROOT}.etcd-password',
            f'"$ctl" user grant-role {ROOT} root',
        ]
        for identity in self.identities.values():
            for command in etcd_commands(identity.account, self.namespace):
                stdin = f" < {identity.password.name}" if "add" in command and command[0] == "user" else ""
                lines.append(f'"$ctl" {shlex.join(command)}{stdin}')
        return "\n".join([*lines, '"$ctl" auth enable', ""])


def _public_key(path: Path) -> str:
    pair = nkeys.from_seed(bytearray(path.read_bytes().strip()))
    return str(pair.public_key.decode())
