"""Options of services, from flags, environment, file and defaults in this order; typed, validated at start, and frozen.

A field ``overlap_score_weight`` is the flag ``--overlap-score-weight``, the variable ``KVROUTER_OVERLAP_SCORE_WEIGHT``
and the key ``overlap_score_weight`` of the file. Its ``validation_alias`` (``AliasChoices``) has further names of the
option, and its ``json_schema_extra={"env": [...]}`` further variables. A boolean option also has ``--no-...``.
"""

from __future__ import annotations

import re
import socket
import uuid
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from kvrouter.net.etcd import EtcdAccess
from kvrouter.net.nats.access import NatsAccess
from kvrouter.net.tls import Tls, TlsOptions
from kvrouter.runtime.config.fields import Address, Name, OptionalAddress, unless_empty
from kvrouter.runtime.config.sources import Options, SettingsError, load, load_all
from kvrouter.runtime.config.static_workers import StaticComponent, StaticEndpoints, read_static_file, static_component
from pydantic import Field, model_validator

__all__ = [
    "Address",
    "Name",
    "OptionalAddress",
    "RoutingSettings",
    "ServiceSettings",
    "SettingsError",
    "load",
    "load_all",
]


def _made_up_id() -> str:
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:40] or "host"
    return f"{host}-{uuid.uuid4().hex[:8]}"


def _check_url(text: str) -> None:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("expected an http or https URL, such as http://127.0.0.1:4318")


class ServiceSettings(Options):
    """Options every service has."""

    namespace: Name = "kvrouter"
    """Namespace of the deployment; only processes of one namespace see each other."""
    etcd: str = Field(default="127.0.0.1:2379", json_schema_extra={"env": ["ETCD_ENDPOINTS"]})
    """Endpoints of etcd, host:port, separated by commas."""
    nats: str = Field(default="nats://127.0.0.1:4222", json_schema_extra={"env": ["NATS_SERVER"]})
    """URLs of NATS, separated by commas."""
    etcd_user: str = ""
    """User in etcd, with --etcd-password-file; empty for none."""
    etcd_password_file: str = ""
    """File with the password of --etcd-user, of mode 0600 or 0640."""
    etcd_ca_file: str = ""
    """PEM file with the authorities of etcd's certificate, for https://; by default --tls-ca-file."""
    nats_user: str = ""
    """User in NATS, with --nats-password-file; empty for none."""
    nats_password_file: str = ""
    """File with the password of --nats-user, of mode 0600 or 0640."""
    nats_token_file: str = ""
    """File with a token for NATS, of mode 0600 or 0640."""
    nats_nkey_file: str = ""
    """File with an NKEY seed for NATS, of mode 0600 or 0640."""
    nats_credentials_file: str = ""
    """Credentials file (.creds) for NATS, of mode 0600 or 0640."""
    nats_ca_file: str = ""
    """PEM file with the authorities of NATS' certificate, for tls://; by default --tls-ca-file."""
    nats_inbox_prefix: str = ""
    """Prefix of this process's reply subjects in NATS, for permissions; empty for _INBOX."""
    bind: Address = "127.0.0.1:0"
    """Address of the gRPC server, host:port; port 0 takes a free one."""
    advertise: str = ""
    """Host or host:port at which other processes reach the gRPC server; empty for the host of --bind."""
    http_bind: OptionalAddress = "127.0.0.1:0"
    """Address of /metrics, /health and /ready, host:port; port 0 takes a free one, empty serves none."""
    http_header_seconds: float = Field(default=10.0, gt=0)
    """Longest time for the headers of an HTTP request, in seconds."""
    tls_cert_file: str = ""
    """PEM file with the certificate of this process; turns TLS on for its servers and connections."""
    tls_key_file: str = ""
    """PEM file with the private key of --tls-cert-file, of mode 0600 or 0640."""
    tls_ca_file: str = ""
    """PEM file with the authorities that certificates of other processes must come from."""
    tls_client_auth: Literal["none", "required"] = "none"
    """Whether gRPC clients must present a certificate of --tls-ca-file."""
    http_tls_client_auth: Literal["none", "optional", "required"] | None = None
    """Whether HTTP clients must present a certificate of --tls-ca-file; by default as gRPC ones."""
    tls_peer_domain: str = ""
    """Domain of the roles in certificates, such as kvrouter.internal; empty checks addresses instead."""
    service_token_file: str = ""
    """File with the token that processes of this system show each other, of mode 0600 or 0640; several lines accept
    several; a line sha256:DIGEST accepts without showing. Empty expects none."""
    instance_id: Name = Field(default_factory=_made_up_id)
    """Id of this process, unique among live processes."""
    lease_seconds: int = Field(default=10, ge=2, le=3600)
    """Time after which a process that died is considered gone, in seconds."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Longest time for running calls to finish after SIGTERM, in seconds."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    log_format: Literal["json", "console"] | None = None
    """Format of log lines; by default console at a terminal, else json."""

    otlp_endpoint: Annotated[str, unless_empty(_check_url)] = ""
    """URL of the OpenTelemetry collector that receives traces over OTLP/HTTP; empty traces nothing."""
    trace_sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the traces to record, where the client did not decide it."""

    def tls_options(self) -> TlsOptions:
        """Returns the options of transport security.

        Raises:
            InvalidTls: they contradict each other.
        """
        return TlsOptions(
            self.tls_cert_file,
            self.tls_key_file,
            self.tls_ca_file,
            self.tls_client_auth,
            self.http_tls_client_auth or self.tls_client_auth,
            self.tls_peer_domain,
        )

    def etcd_access(self) -> EtcdAccess:
        """Returns where etcd is, with user and certificates.

        Raises:
            InvalidEndpoint: an endpoint is malformed, or user and password file are not given together.
            InvalidCertificate, UnreadableSecret: a file cannot be used.
        """
        return EtcdAccess(
            self.etcd,
            user=self.etcd_user,
            password_file=self.etcd_password_file,
            tls=self._infrastructure_tls(self.etcd_ca_file),
        )

    def nats_access(self) -> NatsAccess:
        """Returns where NATS is, with identity and certificates.

        Raises:
            InvalidNats: a URL is malformed, or there is more than one way to authenticate.
            InvalidCertificate, UnreadableSecret: a file cannot be used.
        """
        return NatsAccess(
            self.nats,
            user=self.nats_user,
            password_file=self.nats_password_file,
            token_file=self.nats_token_file,
            nkey_file=self.nats_nkey_file,
            credentials_file=self.nats_credentials_file,
            inbox_prefix=self.nats_inbox_prefix,
            tls=self._infrastructure_tls(self.nats_ca_file),
        )

    def _infrastructure_tls(self, ca_file: str) -> Tls | None:
        """Returns the certificates for a server that is not one of ours, whose own name is checked."""
        return Tls.of(TlsOptions(self.tls_cert_file, self.tls_key_file, ca_file or self.tls_ca_file))

    @model_validator(mode="after")
    def _has_complete_tls(self) -> ServiceSettings:
        options = self.tls_options()
        if options.enabled and not options.cert_file:
            raise ValueError("tls_ca_file is set: a service also needs tls_cert_file and tls_key_file")
        if self.static_endpoints() is None:
            self.etcd_access()
            self.nats_access()
        return self

    def static_endpoints(self) -> StaticEndpoints | None:
        """Returns the listed processes; None if they are discovered in etcd."""
        return None


class RoutingSettings(ServiceSettings):
    """Options of routing services, with listed workers as an alternative to etcd and NATS."""

    max_prompt_tokens: int = Field(default=1 << 20, ge=1)
    """Largest prompt, in tokens, whatever the model allows."""
    static_workers: tuple[str, ...] = ()
    """Workers of a system without etcd and NATS, separated by commas: addresses host:port, or URLs of servers that
    have only an OpenAI API; or a file."""
    static_model: str = ""
    """Name of the model that the workers listed by address serve."""
    static_component: Name = "workers"
    """Name of the component that the workers listed by address form."""
    static_block_size: int = Field(default=16, ge=1, le=1 << 20)
    """Tokens per KV block of the workers listed by address."""
    static_probe_seconds: float = Field(default=1.0, gt=0, le=3600)
    """Interval between liveness probes of listed workers, in seconds."""

    @model_validator(mode="after")
    def _lists_workers(self) -> RoutingSettings:
        _ = self.static_components
        return self

    @cached_property
    def static_components(self) -> tuple[StaticComponent, ...]:
        """The listed workers by component; empty if workers are discovered in etcd.

        Raises:
            ValueError: the list cannot be read or is invalid.
        """
        listed = self.static_workers
        try:
            if len(listed) == 1 and listed[0].endswith(".toml"):
                if "static_model" in self.model_fields_set:
                    raise ValueError(f"{listed[0]} already names the model: remove --static-model")
                return read_static_file(Path(listed[0]))
            if not listed:
                return ()
            if not self.static_model:
                raise ValueError("name the model of the listed workers with --static-model")
            named = static_component(
                listed, name=self.static_component, model=self.static_model, block_size=self.static_block_size
            )
        except ValueError as error:
            raise ValueError(f"--static-workers: {error}") from None
        return (named,)

    def static_endpoints(self) -> StaticEndpoints | None:
        """Returns the listed workers; None if workers are discovered in etcd."""
        components = self.static_components
        return StaticEndpoints(components, probe_seconds=self.static_probe_seconds) if components else None
