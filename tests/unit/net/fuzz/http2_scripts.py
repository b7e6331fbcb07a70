"""Scripts of a server of HTTP/2: frames of every kind in any order, from a corpus and from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import hpack
from kvrouter.net.http2.frames import HEADER_BYTES, Kind, frame, frame_header, read_frame_header

CORPUS = Path(__file__).parent / "corpus"


def corpus(name: str) -> dict[str, bytes]:
    """Returns the inputs of a file, which has a name and hexadecimal digits in each line."""
    lines = (CORPUS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return {label: bytes.fromhex(digits) for label, _, digits in (line.partition(": ") for line in lines)}


def frames_of(sent: bytes) -> Iterator[bytes]:
    position = 0
    while len(sent) - position >= HEADER_BYTES:
        length, *_ = read_frame_header(sent, position)
        end = position + HEADER_BYTES + length
        yield sent[position:end]
        position = end


_FIELDS = [
    (":status", "200"),
    (":status", "103"),
    (":status", "9" * 5_000),
    ("content-type", "application/grpc"),
    ("grpc-status", "0"),
    ("grpc-status", "14"),
    ("grpc-status", "1" * 5_000),
    ("grpc-status", ""),
    ("grpc-message", "%ff%zz%"),
    ("", ""),
]


def random_payload(rng: random.Random, kind: int) -> bytes:
    if kind == Kind.HEADERS and rng.random() < 0.8:
        return hpack.Encoder().encode(rng.sample(_FIELDS, rng.randint(0, 4)))
    if kind == Kind.DATA and rng.random() < 0.7:
        message = rng.randbytes(rng.choice([0, 1, 5, 300, 9_000]))
        return bytes([rng.random() < 0.02]) + len(message).to_bytes(4, "big") + message
    if kind == Kind.SETTINGS and rng.random() < 0.8:
        values = [0, 1, 65_535, 1 << 14, (1 << 24) - 1, (1 << 31) - 1, (1 << 32) - 1]
        return b"".join(
            rng.randrange(9).to_bytes(2, "big") + rng.choice(values).to_bytes(4, "big")
            for _ in range(rng.randint(0, 4))
        )
    if kind == Kind.GOAWAY and rng.random() < 0.8:
        return rng.choice([0, 1, (1 << 31) - 1]).to_bytes(4, "big") + rng.randbytes(4)
    size = {Kind.PRIORITY: 5, Kind.RST_STREAM: 4, Kind.PING: 8, Kind.WINDOW_UPDATE: 4}.get(kind)  # type: ignore[call-overload]
    if size is not None and rng.random() < 0.8:
        return rng.randbytes(size)
    return rng.randbytes(rng.choice([0, 1, 4, 8, 9, 255, 16_384]))


def random_frame(rng: random.Random) -> bytes:
    kind = rng.choice([*Kind, *Kind, Kind.DATA, Kind.DATA, rng.randrange(256)])
    stream = rng.choice([0, 1, 1, 1, 2, 3, (1 << 32) - 1])
    if rng.random() < 0.7:
        stream = 0 if kind in {Kind.SETTINGS, Kind.PING, Kind.GOAWAY} else 1
    flags = rng.choice([0, 0, 0, 0x1, 0x4, 0x5, 0x8, 0x20, 0x2C, rng.randrange(256)])
    payload = random_payload(rng, kind)
    if rng.random() < 0.03:
        return frame_header(rng.randrange(1 << 24), kind, flags, stream) + payload
    return frame(kind, payload, flags=flags, stream=stream)  # type: ignore[arg-type]


def random_script(rng: random.Random, seeds: list[bytes]) -> bytes:
    """Returns what a server sends: corpus entries and random frames, spliced, repeated, left out and damaged."""
    frames: list[bytes] = []
    if rng.random() < 0.8:
        frames += frames_of(seeds[0])
    for _ in range(rng.randint(1, 12)):
        if rng.random() < 0.3:
            frames += frames_of(rng.choice(seeds))
        else:
            frames.append(random_frame(rng))
    if rng.random() < 0.2:
        rng.shuffle(frames)
    if rng.random() < 0.1:
        frames.insert(rng.randrange(len(frames) + 1), random_frame(rng) * rng.choice([2, 50, 2_000]))
    sent = bytearray(b"".join(frames))
    if sent and rng.random() < 0.2:
        for _ in range(rng.randint(1, 4)):
            sent[rng.randrange(len(sent))] = rng.randrange(256)
    return bytes(sent)


def cut(rng: random.Random, sent: bytes) -> Iterator[bytes]:
    """Cuts what is sent anywhere."""
    position = 0
    largest = rng.choice([1, 7, 100, 5_000, 1 << 18])
    while position < len(sent):
        end = position + rng.randint(1, largest)
        yield sent[position:end]
        position = end
