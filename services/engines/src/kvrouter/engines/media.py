"""Images, sound and video in prompts: the parts of messages with them, their placeholders, and the ids of KV events.

vLLM names an image by BLAKE3 over its file and the model's name, so whoever has both can compute the id. It names
sound and video by what it decodes of them, and other engines name all media by features: nobody else knows these ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from blake3 import blake3

MediumKind = Literal["image", "audio", "video"]

PLACEHOLDERS: Final[Mapping[MediumKind, tuple[str, ...]]] = {
    "image": ("<|image_pad|>", "<image>", "<|image|>", "[IMG]", "<start_of_image>", "<image_soft_token>"),
    "audio": ("<|audio_pad|>", "<|AUDIO|>", "<audio>", "<|audio|>", "[AUDIO]", "<audio_soft_token>"),
    "video": ("<|video_pad|>", "<video>", "<|video|>"),
}
"""Tokens that chat templates write in the place of a medium, besides those that a tokenizer names."""

_PARTS: Final[Mapping[str, tuple[MediumKind, str]]] = {
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "audio_url": ("audio", "audio_url"),
    "input_audio": ("audio", "input_audio"),
    "video_url": ("video", "video_url"),
}
"""By type of part, what it is and the field that has it."""
_SOURCES: Final = ("url", "data")
_DATA_URL: Final = ";base64,"


class Medium(NamedTuple):
    """A part of a message that is no text."""

    kind: MediumKind
    url: str = ""
    """Where the engine fetches it; empty if the part has the content, or names only ``uuid``."""
    base64: str = ""
    """The content."""
    uuid: str = ""
    """The client's own id of it, which vLLM takes as it is."""


def read_medium(part: Mapping[str, Any]) -> Medium | None:
    """Returns the medium in a part of a message; None if it has none that is known here."""
    name = part.get("type")
    found = _PARTS.get(name) if isinstance(name, str) else None
    if found is None:
        return None
    kind, field = found
    source, uuid = part.get(field), part.get("uuid")
    if isinstance(source, dict):
        source = next((source[name] for name in _SOURCES if name in source), None)
    uuid = uuid if isinstance(uuid, str) else ""
    if not isinstance(source, str):
        return Medium(kind, uuid=uuid) if uuid and source is None else None
    if field == "input_audio":
        return Medium(kind, base64=source, uuid=uuid)
    if source[:5].lower() == "data:":
        _, mark, content = source.partition(_DATA_URL)
        return Medium(kind, base64=content, uuid=uuid) if mark else Medium(kind, url=source, uuid=uuid)
    return Medium(kind, url=source, uuid=uuid)


class ImageHeader(NamedTuple):
    """What the first bytes of an image say."""

    width: int
    height: int
    is_rgb: bool
    """Whether it has exactly three colours and no palette, so no engine converts it."""


_MAX_SEGMENTS = 1000
"""Parts of a JPEG before its size that are read."""
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})


def read_image_header(head: bytes) -> ImageHeader | None:
    """Returns what the first bytes of a PNG, JPEG, GIF or WebP say; None for others, or if they do not suffice."""
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            width, height, _, colours = struct.unpack_from(">IIBB", head, 16)
            return ImageHeader(width, height, colours == 2)
        if head.startswith(b"GIF8"):
            width, height = struct.unpack_from("<HH", head, 6)
            return ImageHeader(width, height, False)
        if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            return _webp(head)
        return _jpeg(head) if head.startswith(b"\xff\xd8") else None
    except (struct.error, IndexError):
        return None


def _webp(head: bytes) -> ImageHeader | None:
    match head[12:16]:
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", head, 26)
            return ImageHeader(width & 0x3FFF, height & 0x3FFF, True)
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", head, 21)
            return ImageHeader((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, not bits >> 28 & 1)
        case b"VP8X":
            width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
            return ImageHeader(width, height, not head[20] & 0x10)
    return None


def _jpeg(head: bytes) -> ImageHeader | None:
    at = 2
    for _ in range(_MAX_SEGMENTS):
        while head[at] == 0xFF and head[at + 1] == 0xFF:
            at += 1
        if head[at] != 0xFF:
            return None
        marker, size = head[at + 1], int.from_bytes(head[at + 2 : at + 4], "big")
        if marker in _FRAMES:
            height, width, components = struct.unpack_from(">HHB", head, at + 5)
            return ImageHeader(width, height, components == 3)
        at += 2 + size
    return None


class VllmImageId:
    """Computes the id of an image in vLLM's KV events, from its file in pieces.

    It is BLAKE3 over named values, each preceded by its kind and length: the image and the model. An image that is not
    RGB comes with the settings by which vLLM converts it. Settings of a server or request that change the image change
    the id.
    """

    def __init__(self, model: str, header: ImageHeader, size: int) -> None:
        """Begins an id.

        Args:
            model: The model as the engine was started with it.
            header: Header of the file.
            size: Size of the file, bytes.
        """
        content = _name("image") + (_LEAF if header.is_rgb else _CONVERTED + _name("data") + _LEAF)
        self._digest = blake3(_name("image") + _LEAF + content + _length(size))
        self._end = _name("model_id") + _text(model)

    def update(self, piece: bytes) -> None:
        """Adds the next piece of the file."""
        self._digest.update(piece)

    def hexdigest(self) -> str:
        """Returns the id of the complete file."""
        self._digest.update(self._end)
        return self._digest.hexdigest()


def _length(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _name(name: str) -> bytes:
    return _length(len(name.encode())) + name.encode()


def _text(text: str) -> bytes:
    return _LEAF + _name(text)


def _numbers(*numbers: int) -> Iterator[bytes]:
    yield b"\x01" + _length(len(numbers))
    for number in numbers:
        yield _LEAF + _length(8) + _length(number)


_LEAF: Final = b"\x03"
_MAPPING: Final = b"\x02" + _length(2)
_WHITE: Final = b"".join(_numbers(255, 255, 255))
_SETTINGS: Final = _MAPPING + _name("image_mode") + _text("RGB") + _name("rgba_background_color") + _WHITE
_CONVERTED: Final = _MAPPING + _name("io_config") + _SETTINGS
