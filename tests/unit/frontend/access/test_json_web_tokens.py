"""Which tokens are accepted, and whom they name."""

from __future__ import annotations

import base64
import json
import time
from functools import cache
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from kvrouter.frontend.access.caller import Role
from kvrouter.frontend.access.json_web_tokens import InvalidKeys, JsonWebTokens, SigningKeys
from kvrouter.frontend.access.key_file import TenantEntry
from kvrouter.frontend.access.refusals import CredentialRefused, RefusalReason
from kvrouter.frontend.settings import FrontendSettings

SECRET = b"s" * 32
ALGORITHMS = ("HS256", "RS256", "PS256", "ES256", "EdDSA")


@cache
def private(kind: str) -> Any:
    if kind == "RSA":
        return rsa.generate_private_key(65537, 2048)
    if kind == "EC":
        return ec.generate_private_key(ec.SECP256R1())
    return ed25519.Ed25519PrivateKey.generate() if kind == "OKP" else SECRET


KINDS = {"HS256": "oct", "RS256": "RSA", "PS256": "RSA", "ES256": "EC", "EdDSA": "OKP"}


def document(**extra: Any) -> dict[str, Any]:
    """A key set with a key of each kind, whose id is its kind."""
    keys: list[dict[str, Any]] = [
        json.loads(RSAAlgorithm.to_jwk(private("RSA").public_key())) | {"kid": "RSA"},
        json.loads(ECAlgorithm.to_jwk(private("EC").public_key())) | {"kid": "EC"},
        json.loads(OKPAlgorithm.to_jwk(private("OKP").public_key())) | {"kid": "OKP"},
        {"kty": "oct", "k": base64.urlsafe_b64encode(SECRET).decode().rstrip("="), "kid": "oct"},
    ]
    for key in keys:
        key.pop("key_ops", None)
    return {"keys": [key | extra for key in keys]}


def tokens(*algorithms: str, keys: dict[str, Any] | None = None) -> JsonWebTokens:
    made = JsonWebTokens(
        FrontendSettings(
            jwt_issuer="issuer",
            jwt_audience="audience",
            jwt_algorithms=tuple(algorithms or ALGORITHMS),
            jwt_leeway_seconds=0.0,
        )
    )
    made.keys = SigningKeys(keys or document())
    return made


def token(
    algorithm: str = "RS256", *, kid: str | None = None, headers: dict[str, Any] | None = None, **claims: Any
) -> str:
    kind = KINDS[algorithm]
    standard = {"iss": "issuer", "aud": "audience", "sub": "me", "exp": time.time() + 60}
    given = {name: value for name, value in (standard | claims).items() if value is not None}
    return jwt.encode(given, private(kind), algorithm, headers={"kid": kid or kind, **(headers or {})})


def why(verifier: JsonWebTokens, given: str) -> RefusalReason:
    with pytest.raises(CredentialRefused) as refused:
        verifier.authenticate(given, {})
    assert given not in refused.value.message
    return refused.value.why


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_algorithm_is_accepted_only_if_it_is_listed(algorithm: str) -> None:
    given = token(algorithm)
    assert tokens(algorithm).authenticate(given, {}).name == "sub:me"
    others = [each for each in ALGORITHMS if each != algorithm]
    assert why(tokens(*others), given) is RefusalReason.INVALID_TOKEN


def test_claims_name_tenant_models_and_role() -> None:
    tenants = {"t": TenantEntry(name="t", isolated=True, min_priority=3, concurrency=2)}
    caller = tokens().authenticate(token(tenant="t", models="a b", role="admin"), tenants)
    assert (caller.tenant, caller.models, caller.role) == ("t", ("a", "b"), Role.ADMIN)
    assert (caller.isolated, caller.min_priority, caller.tenant_limits.concurrency) == (True, 3, 2)
    plain = tokens().authenticate(token(models=["x"]), tenants)
    assert (plain.tenant, plain.models, plain.role) == ("", ("x",), Role.CLIENT)


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"exp": 1}, RefusalReason.EXPIRED),
        ({"exp": None}, RefusalReason.INVALID_TOKEN),
        ({"exp": "never"}, RefusalReason.INVALID_TOKEN),
        ({"nbf": 1 << 40}, RefusalReason.INVALID_TOKEN),
        ({"aud": "other"}, RefusalReason.INVALID_TOKEN),
        ({"aud": None}, RefusalReason.INVALID_TOKEN),
        ({"iss": "other"}, RefusalReason.INVALID_TOKEN),
        ({"iss": None}, RefusalReason.INVALID_TOKEN),
        ({"sub": None}, RefusalReason.INVALID_TOKEN),
        ({"tenant": "a:b"}, RefusalReason.INVALID_TOKEN),
        ({"tenant": 1}, RefusalReason.INVALID_TOKEN),
        ({"role": "root"}, RefusalReason.INVALID_TOKEN),
        ({"role": ["admin"]}, RefusalReason.INVALID_TOKEN),
        ({"models": {"a": 1}}, RefusalReason.INVALID_TOKEN),
        ({"models": [1]}, RefusalReason.INVALID_TOKEN),
        ({"kid": "nobody"}, RefusalReason.INVALID_TOKEN),
        ({"headers": {"crit": ["x"]}}, RefusalReason.INVALID_TOKEN),
    ],
)
def test_a_token_that_is_not_valid_is_refused(claims: dict[str, Any], reason: RefusalReason) -> None:
    assert why(tokens(), token(**claims)) is reason


def test_an_unsigned_token_is_refused() -> None:
    claims = {"iss": "issuer", "aud": "audience", "sub": "me", "exp": time.time() + 60}
    for algorithm in ("none", "None", "NONE"):
        parts = ({"alg": algorithm, "typ": "JWT", "kid": "RSA"}, claims)
        encoded = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
        assert why(tokens(), f"{encoded}.") is RefusalReason.INVALID_TOKEN


def test_a_public_key_is_not_taken_for_a_secret() -> None:
    public = private("RSA").public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    claims = {"iss": "issuer", "aud": "audience", "sub": "me", "exp": time.time() + 60}

    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).decode().rstrip("=")

    signed = f"{part(json.dumps({'alg': 'HS256', 'kid': 'RSA'}).encode())}.{part(json.dumps(claims).encode())}"
    algorithm = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    forged = f"{signed}.{part(algorithm.sign(signed.encode(), public))}"
    assert why(tokens(), forged) is RefusalReason.INVALID_TOKEN


def test_a_changed_token_is_refused_even_if_the_original_was_accepted() -> None:
    verifier = tokens()
    given = token(role="client")
    tenants: dict[str, TenantEntry] = {}
    assert verifier.authenticate(given, tenants) is verifier.authenticate(given, tenants)
    header, claims, signature = given.split(".")
    admin = base64.urlsafe_b64encode(base64.urlsafe_b64decode(claims + "==").replace(b"client", b"admin")).decode()
    assert why(verifier, f"{header}.{admin.rstrip('=')}.{signature}") is RefusalReason.INVALID_TOKEN


def test_a_key_for_one_algorithm_verifies_no_other() -> None:
    only = tokens(keys=document(alg="RS256"))
    assert only.authenticate(token("RS256"), {}).name == "sub:me"
    assert why(only, token("PS256")) is RefusalReason.INVALID_TOKEN


def test_remembered_tokens_end_with_their_keys() -> None:
    verifier = tokens()
    given = token()
    verifier.authenticate(given, {})
    others = [key for key in document()["keys"] if key["kid"] != "RSA"]
    verifier.keys = SigningKeys({"keys": others})
    assert why(verifier, given) is RefusalReason.INVALID_TOKEN
    assert verifier.unknown_key
    verifier.keys = None
    assert why(verifier, given) is RefusalReason.NO_TOKEN_KEYS


def test_a_subject_cannot_forge_log_lines() -> None:
    caller = tokens().authenticate(token(sub="a\nb " + "c" * 100), {})
    assert caller.name == "sub:a?b?" + "c" * 60


@pytest.mark.parametrize("content", [[], {}, {"keys": {}}, {"keys": []}, {"keys": [{"kty": "odd"}]}, {"keys": [1]}])
def test_a_key_set_without_keys_is_refused(content: object) -> None:
    with pytest.raises(InvalidKeys, match="JSON Web Key Set"):
        SigningKeys(content)


@pytest.mark.parametrize("given", ["..", "a.b.c", "eyJhbGciOiJSUzI1NiJ9..", "." * 3])
def test_garbage_is_refused(given: str) -> None:
    assert why(tokens(), given) is RefusalReason.INVALID_TOKEN
