"""Bodies of HTTP requests that are damaged, too large, or never come: each is answered, and the next one is served."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from kvrouter.frontend.access import body_room

from ..gateway import MODEL, System, running_system

SPACE = "".join(random.Random(1).choices(" \n\t\r", k=3_000_000))
"""Does not compress to less than several packets."""

BODY = json.dumps({"model": MODEL, "prompt": list(range(40)), "max_tokens": 5}).replace("[", "[" + SPACE).encode()


@pytest.fixture
async def served(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    async with running_system(nats_url, etcd_endpoint, namespace, http_body_seconds=4) as system:
        await system.start_worker(1)
        yield system


async def post(system: System, body: bytes, **headers: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{system.http}/v1/completions", data=body, headers=headers) as response,
    ):
        answer = await response.json()
        return response.status, answer["error"]["message"] if "error" in answer else ""


async def test_a_compressed_body_is_read(served: System) -> None:
    assert (await post(served, gzip.compress(BODY), **{"Content-Encoding": "gzip"}))[0] == 200
    assert (await post(served, zlib.compress(BODY), **{"Content-Encoding": "deflate"}))[0] == 200
    middle = len(BODY) // 2
    members = gzip.compress(BODY[:middle]) + gzip.compress(BODY[middle:])
    assert (await post(served, members, **{"Content-Encoding": "gzip"}))[0] == 200


async def test_an_unknown_encoding_is_a_bad_request(served: System) -> None:
    status, message = await post(served, BODY, **{"Content-Encoding": "br"})
    assert status == 400
    assert "'br' is not supported" in message


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    "body",
    [BODY, gzip.compress(BODY)[:-20], gzip.compress(BODY)[:120_000] + b"\x00\xff" * 40],
    ids=["plain", "cut", "bad"],
)
async def test_a_body_that_cannot_be_decompressed_is_a_bad_request(served: System, encoding: str, body: bytes) -> None:
    if encoding == "deflate" and body != BODY:
        body = body[10:]
    status, message = await post(served, body, **{"Content-Encoding": encoding})
    assert status == 400
    assert "internal" not in message
    assert (await post(served, BODY))[0] == 200


async def test_a_small_body_that_decompresses_to_a_large_one_is_refused(served: System) -> None:
    bomb = gzip.compress(bytes(256 << 20), 9)
    status, message = await post(served, bomb, **{"Content-Encoding": "gzip"})
    assert (status, message.split(".")[0]) == (413, "the body is more than 50 times its compressed size")


async def test_a_body_beyond_the_limit_is_too_large(served: System) -> None:
    host, port = served.http.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % ((64 << 20) + 1))
    async with asyncio.timeout(30):
        assert b" 413 " in await reader.readline()
    writer.close()


async def test_a_text_beyond_the_limit_is_too_large(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace, max_prompt_tokens=1000) as system:
        await system.start_worker(1)
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 280_000}]}
        url = f"http://{system.http}/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=chat) as response:
            assert response.status == 413
            assert "exceeds 270144 bytes" in (await response.json())["error"]["message"]
        async with aiohttp.ClientSession() as session, session.post(url, json=chat | {"messages": []}) as response:
            assert response.status == 400


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_a_body_that_grows_beyond_the_limit_is_too_large(served: System, encoding: str) -> None:
    zipped = zlib.compressobj(1, wbits=16 + zlib.MAX_WBITS)
    part = random.Random(1).choices(" \n\t\r", k=1 << 20)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(65):
            plain = "".join(part).encode()
            yield zipped.compress(plain) if encoding == "gzip" else plain
        if encoding == "gzip":
            yield zipped.flush()

    async with aiohttp.ClientSession() as session:
        url, headers = f"http://{served.http}/v1/completions", {"Content-Encoding": encoding}
        async with session.post(url, data=parts(), headers=headers) as response:
            assert response.status == 413
            assert "exceeds 67108864 bytes" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("path", ["v1/completions", "v1/chat/completions", "v1/nothing"])
async def test_an_unknown_expectation_is_an_error_as_all_others(served: System, path: str) -> None:
    url = f"http://{served.http}/{path}"
    async with aiohttp.ClientSession() as session:
        async with session.post(url, data=BODY, headers={"Expect": "a miracle"}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"]) == (417, "invalid_request_error")
            assert "100-continue" in error["message"]
        async with session.post(url, data=BODY, expect100=True) as response:
            error = (await response.json()).get("error")
            assert response.status == {"v1/completions": 200, "v1/chat/completions": 400, "v1/nothing": 404}[path], (
                error
            )
            assert error is None or error["type"] == "invalid_request_error"


async def test_a_body_that_stops_coming_is_answered_with_a_time_out(served: System) -> None:
    host, port = served.http.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    async with asyncio.timeout(30):
        assert b"408" in await reader.readline()
        await reader.read()
    writer.close()


async def test_a_slow_body_is_read_as_long_as_it_comes(served: System) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        for start in range(0, len(BODY), 250_000):
            yield BODY[start : start + 250_000]
            await asyncio.sleep(0.4)

    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{served.http}/v1/completions", data=slowly()) as response,
    ):
        assert response.status == 200


async def test_bodies_that_are_read_at_once_have_a_bound_in_sum(
    nats_url: str, etcd_endpoint: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_room, "WAIT_SECONDS", 0.1)
    bound = 1 << 20
    where = nats_url, etcd_endpoint, namespace
    async with running_system(*where, max_prompt_bytes_in_flight=bound) as system:
        host, port = system.http.split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (2 * bound)
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        for _, writer in connections:
            writer.write(head + bytes(bound))
        sample = system.runtime.registry.get_sample_value
        labels = {"bound": "prompt_bytes_in_flight", "when_full": "refuses"}
        answers = [asyncio.create_task(reader.readline()) for reader, _ in connections]
        async with asyncio.timeout(30):
            # All but the oldest one.
            while sum(answer.done() for answer in answers) < 7:
                assert (sample("kvrouter_bound_used", labels) or 0) <= 3 * bound
                await asyncio.sleep(0.01)
        assert [answer.result().split()[1] for answer in answers if answer.done()] == [b"429"] * 7
        for (_, writer), answer in zip(connections, answers, strict=True):
            writer.close()
            answer.cancel()
        await asyncio.wait(answers)
        async with asyncio.timeout(30):
            while sample("kvrouter_bound_used", labels):
                await asyncio.sleep(0.01)
