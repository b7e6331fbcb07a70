"""A NATS for each way to authenticate besides certificates: users, tokens, NKEYs, and JWTs with credentials files."""

from __future__ import annotations

import base64
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import nkeys
from kvrouter.devtools.system.certificates import write_file


@dataclass(frozen=True)
class NatsIdentity:
    """Settings of a server, and options of a client that it admits."""

    settings: str
    options: dict[str, str]
    secret: Path
    wrong: bytes
    """Content of the same file that the server refuses."""


def identity(kind: str, folder: Path) -> NatsIdentity:
    """Returns one of the kinds password, token, nkey and credentials."""
    folder.mkdir(exist_ok=True)
    secret = folder / kind
    if kind == "password":
        write_file(secret, b"open-sesame\n", 0o600)
        settings = 'authorization { users: [{ user: "ann", password: "open-sesame" }] }\n'
        return NatsIdentity(settings, {"user": "ann", "password_file": str(secret)}, secret, b"hunter-two\n")
    if kind == "token":
        write_file(secret, b"open-sesame\n", 0o600)
        settings = 'authorization { token: "open-sesame" }\n'
        return NatsIdentity(settings, {"token_file": str(secret)}, secret, b"hunter-two\n")
    if kind == "nkey":
        pair, seed = _pair(nkeys.PREFIX_BYTE_USER)
        write_file(secret, seed, 0o600)
        settings = f"authorization {{ users: [{{ nkey: {_public(pair)} }}] }}\n"
        return NatsIdentity(settings, {"nkey_file": str(secret)}, secret, _pair(nkeys.PREFIX_BYTE_USER)[1])
    return _credentials(secret)


def _credentials(secret: Path) -> NatsIdentity:
    operator, _ = _pair(nkeys.PREFIX_BYTE_OPERATOR)
    system, _ = _pair(nkeys.PREFIX_BYTE_ACCOUNT)
    account, _ = _pair(nkeys.PREFIX_BYTE_ACCOUNT)
    stranger, _ = _pair(nkeys.PREFIX_BYTE_ACCOUNT)
    everything = dict.fromkeys(("subs", "conn", "leaf", "imports", "exports", "data", "payload"), -1)
    storage = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    accounts = {
        _public(system): _token(operator, _public(system), {"type": "account", "limits": everything}),
        _public(account): _token(operator, _public(account), {"type": "account", "limits": everything | storage}),
    }
    preloaded = "".join(f"  {name}: {jwt}\n" for name, jwt in accounts.items())
    settings = (
        f"operator: {_token(operator, _public(operator), {'type': 'operator'})}\n"
        f"system_account: {_public(system)}\n"
        f"resolver: MEMORY\nresolver_preload: {{\n{preloaded}}}\n"
    )
    write_file(secret, _file_of_a_user(account), 0o600)
    return NatsIdentity(settings, {"credentials_file": str(secret)}, secret, _file_of_a_user(stranger))


def _file_of_a_user(account: nkeys.KeyPair) -> bytes:
    pair, seed = _pair(nkeys.PREFIX_BYTE_USER)
    jwt = _token(account, _public(pair), {"type": "user", "subs": -1, "data": -1, "payload": -1})
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        "************************* IMPORTANT *************************\n"
        "NKEY Seed printed below can be used to sign and prove identity.\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed.decode()}\n------END USER NKEY SEED------\n"
    ).encode()


def _pair(prefix: int) -> tuple[nkeys.KeyPair, bytes]:
    seed = bytes(nkeys.encode_seed(os.urandom(32), prefix))
    return nkeys.from_seed(bytearray(seed)), seed


def _public(pair: nkeys.KeyPair) -> str:
    return str(pair.public_key.decode())


def _token(issuer: nkeys.KeyPair, subject: str, claims: dict[str, object]) -> str:
    """Returns a JWT of NATS, version 2."""
    body = {"jti": subject, "iat": int(time.time()), "iss": _public(issuer), "name": "test", "sub": subject}
    parts = ({"typ": "JWT", "alg": "ed25519-nkey"}, body | {"nats": {"version": 2} | claims})
    signed = ".".join(_encoded(json.dumps(part).encode()) for part in parts)
    return f"{signed}.{_encoded(issuer.sign(signed.encode()))}"


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
