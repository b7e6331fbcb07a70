"""JSON Web Tokens over the APIs of a Frontend, and keys that change."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from aiohttp import web
from kvrouter.frontend.access import json_web_tokens
from kvrouter.frontend.access.json_web_tokens import FollowedSigningKeys, InvalidKeys, JsonWebTokens, check_location
from kvrouter.frontend.access.refusals import CredentialRefused
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.runtime.telemetry.metrics import new_registry

from ..gateway import MODEL, running_system
from .keys import Keys

SECRET = "s" * 32
BODY = {"model": MODEL, "prompt": list(range(40)), "max_tokens": 3}


def key_set(secret: str = SECRET, kid: str = "k") -> str:
    encoded = base64.urlsafe_b64encode(secret.encode()).decode().rstrip("=")
    return json.dumps({"keys": [{"kty": "oct", "k": encoded, "kid": kid}]})


def token(secret: str = SECRET, kid: str = "k", **claims: Any) -> str:
    standard = {"iss": "issuer", "aud": "audience", "sub": "me", "exp": time.time() + 600}
    return jwt.encode(standard | claims, secret, "HS256", headers={"kid": kid})


def followed(location: str) -> tuple[JsonWebTokens, FollowedSigningKeys]:
    settings = FrontendSettings(
        jwt_issuer="issuer", jwt_audience="audience", jwt_algorithms=("HS256",), jwt_leeway_seconds=0.0
    )
    tokens = JsonWebTokens(settings)
    return tokens, FollowedSigningKeys(location, tokens, new_registry())


async def test_tokens_are_accepted_beside_keys(
    nats_url: str, etcd_endpoint: str, namespace: str, keys: Keys, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "jwks.json"
    path.touch(0o600)
    path.write_text(key_set())
    options: dict[str, Any] = {
        **keys.options(),
        "jwt_keys": str(path),
        "jwt_issuer": "issuer",
        "jwt_audience": "audience",
        "jwt_algorithms": ("HS256",),
    }
    given = {
        token(): 200,
        token(tenant="t"): 200,
        keys["client"]: 200,
        token(models=["another"]): 403,
        token(exp=1): 401,
        token(aud="other"): 401,
        token("x" * 32): 401,
    }
    async with (
        running_system(nats_url, etcd_endpoint, namespace, **options) as system,
        aiohttp.ClientSession(f"http://{system.http}") as http,
    ):
        await system.start_worker(1)
        for credential, status in given.items():
            headers = {"authorization": f"Bearer {credential}"}
            async with http.post("/v1/completions", json=BODY, headers=headers) as response:
                assert response.status == status, await response.text()
        async with http.get("/metrics", headers={"authorization": f"Bearer {token(role='admin')}"}) as response:
            assert response.status == 200
    written = "".join(capfd.readouterr())
    assert "access.refused" in written
    assert not any(credential.rpartition(".")[2] in written for credential in given)


async def test_a_changed_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.touch(0o600)
    path.write_text(key_set())
    tokens, keys = followed(str(path))
    running = asyncio.create_task(keys.run())
    former = tokens.keys
    (tmp_path / "new").touch(0o600)
    (tmp_path / "new").write_text(key_set("n" * 32))
    (tmp_path / "new").rename(path)
    async with asyncio.timeout(30):
        while tokens.keys is former:
            await asyncio.sleep(0.02)
    assert tokens.authenticate(token("n" * 32), {}).name == "sub:me"
    running.cancel()
    await asyncio.wait([running])


async def test_a_file_with_a_secret_must_be_protected(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(key_set())
    path.chmod(0o644)
    with pytest.raises(InvalidKeys, match="mode 644"):
        followed(str(path))


async def test_keys_of_a_url_are_fetched_again_for_an_unknown_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_web_tokens, "_EARLY_SECONDS", 0.01)
    answers = [web.Response(status=500), web.Response(text="[]"), web.Response(text=key_set())]
    application = web.Application()

    async def answer(_: web.Request) -> web.Response:
        return answers.pop(0) if answers else web.Response(text=key_set("n" * 32, "new"))

    application.router.add_get("/keys", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    tokens, keys = followed(f"http://{host}:{port}/keys")
    running = asyncio.create_task(keys.run())
    async with asyncio.timeout(30):
        while tokens.keys is None:
            await asyncio.sleep(0.02)
        assert tokens.authenticate(token(), {}).name == "sub:me"
        former = tokens.keys
        with pytest.raises(CredentialRefused, match="its key is not known"):
            tokens.authenticate(token("n" * 32, "new"), {})
        while tokens.keys is former:
            await asyncio.sleep(0.02)
    assert tokens.authenticate(token("n" * 32, "new"), {}).name == "sub:me"
    running.cancel()
    await asyncio.wait([running])
    await runner.cleanup()


def test_keys_are_fetched_from_other_machines_with_tls_only() -> None:
    check_location("https://issuer.example/keys")
    check_location("http://127.0.0.1:8080/keys")
    with pytest.raises(ValueError, match="https"):
        check_location("http://issuer.example/keys")
