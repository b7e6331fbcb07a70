"""Creates a certificate authority for development, and certificates of services."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PEER_DOMAIN = "kvrouter.internal"
"""Domain of the roles' names in the certificates."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_CLOCK_SKEW = timedelta(minutes=5)
"""Machines whose clocks are behind by this accept a certificate at once."""


@dataclass(frozen=True, slots=True)
class CertificatePaths:
    """The files of one certificate."""

    cert: Path
    key: Path
    authority: Path


class DevelopmentAuthority:
    """An authority in a folder: ``ca.crt`` and ``ca.key``. Created if the folder has none."""

    def __init__(self, folder: Path, *, days: float = 365) -> None:
        """Reads the authority of a folder, or creates one.

        Args:
            folder: Where the files are; created with mode 0700.
            days: Validity of the authority if it is created, and of the certificates.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.certificate_path = folder / "ca.crt"
        self._days = days
        key_path = folder / "ca.key"
        if key_path.exists() and self.certificate_path.exists():
            key = serialization.load_pem_private_key(key_path.read_bytes(), None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ValueError(f"{key_path}: expected a key that this command created; use another folder")
            self._key = key
            self._certificate = x509.load_pem_x509_certificate(self.certificate_path.read_bytes())
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _name("kvrouter development CA")
        builder = _builder(name, name, self._key, days).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        usage = _usage(signs_certificates=True)
        self._certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        _write_key(key_path, self._key)
        write_file(self.certificate_path, _pem(self._certificate), 0o644)

    def paths(self, name: str) -> CertificatePaths:
        """Returns the files of a certificate that was issued."""
        return CertificatePaths(self.folder / f"{name}.crt", self.folder / f"{name}.key", self.certificate_path)

    def issue(
        self, name: str, hosts: Sequence[str] = LOOPBACK, *, role: str = "", valid_from: datetime | None = None
    ) -> CertificatePaths:
        """Creates ``NAME.crt`` and ``NAME.key``, replacing previous ones.

        Args:
            name: Name of the files.
            hosts: Host names and addresses that it contains as well.
            role: The certificate contains ``ROLE.kvrouter.internal``; by default the name.
            valid_from: Start of its validity; by default now.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [x509.DNSName(f"{role or name}.{PEER_DOMAIN}"), *(_alternative(host) for host in hosts)]
        issuer = self._certificate.subject
        certificate = (
            _builder(_name(f"{name}.{PEER_DOMAIN}"), issuer, key, self._days, valid_from)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        paths = self.paths(name)
        # Services read both files when they change; between the two writes they keep the previous pair.
        _write_key(paths.key, key)
        write_file(paths.cert, _pem(certificate), 0o644)
        return paths


def write_file(path: Path, content: bytes, mode: int) -> None:
    """Writes a file with a mode, and replaces a previous one at once."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    new.replace(path)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: float,
    valid_from: datetime | None = None,
) -> x509.CertificateBuilder:
    start = valid_from or datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _CLOCK_SKEW)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_file(path, pem, 0o600)
