"""Fields that requests of several services share: component, request id, stage, length of the prompt, hashes.

A packed buffer of hashes holds 8 bytes for each, little-endian. The contract declares hashes as ``repeated fixed64``,
which any language can write; its packed encoding is that of a ``bytes`` field. So the encoding of a public message is
decoded as its twin (``packed.proto``), and the other way round, without a Python number for each hash. protobuf reads
``repeated fixed64`` in packed and in unpacked form and always writes the packed one, so hashes of a sender that does
not pack are understood as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvrouter.net.wire_format import encode_field, tag
from kvrouter.v1.common_pb2 import Component, LocalHashes, MultimodalHash, Role, Stage
from kvrouter.v1.errors import BadRequest, PromptTooLong
from kvrouter.v1.names import ComponentName, InvalidName
from kvrouter.v1.packed_pb2 import PackedLocalHashes, PackedReassertBooking
from kvrouter.v1.scheduler_pb2 import ReassertBooking


def component_name(component: Component) -> ComponentName:
    """Returns the component's name.

    Raises:
        BadRequest: a part of the name is invalid.
    """
    try:
        return ComponentName(component.namespace, component.name)
    except InvalidName as error:
        raise BadRequest(
            str(error)[:512], field="component", advice="Send a valid namespace and a valid name."
        ) from None


_COMPUTES_PROMPTS = frozenset({Role.ROLE_UNSPECIFIED, Role.ROLE_BOTH, Role.ROLE_PREFILL})
_GENERATES = frozenset({Role.ROLE_UNSPECIFIED, Role.ROLE_BOTH, Role.ROLE_DECODE})
_PREFILL = Stage.STAGE_PREFILL  # read once: looking up an enum value by name takes a microsecond


def serves(role: Role, stage: Stage = Stage.STAGE_WHOLE) -> bool:
    """Returns whether a worker or component of a role runs a stage. A decode worker can compute prompts itself."""
    return role in (_COMPUTES_PROMPTS if stage == _PREFILL else _GENERATES)


def content_in_blocks(hashes: Sequence[MultimodalHash], block_size: int) -> list[tuple[int, int]]:
    """Returns (block index, content hash) for each hash of multimodal content, as ``local_hashes`` takes them."""
    return [
        (item.token_index // block_size if "token_index" in item else item.block_index, item.hash) for item in hashes
    ]


_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, line breaks, and halves of pairs, as which Python reads bytes that are not UTF-8."""


def is_plain_text(value: str, max_bytes: int) -> bool:
    """Returns whether a value is UTF-8 without control characters, and has at most so many bytes."""
    if value.isascii():
        return value.isprintable() and len(value) <= max_bytes
    return not _UNSAFE.search(value) and len(value.encode()) <= max_bytes


def check_request_id(request_id: str, max_bytes: int, field: str) -> None:
    """Checks an id a client chose; it may be empty.

    Args:
        request_id: The id.
        max_bytes: Its maximum size.
        field: The field or header that has it, for the error.

    Raises:
        BadRequest: it has control characters or is not UTF-8, or it is too long.
    """
    if is_plain_text(request_id, max_bytes):
        return
    if _UNSAFE.search(request_id):
        raise BadRequest(
            f"{field}: expected UTF-8 without control characters, received {request_id[:32]!r}",
            field=field,
            advice="Send letters, digits and punctuation, such as a UUID.",
        )
    raise BadRequest(f"{field} is longer than {max_bytes} bytes", field=field, advice="Send a shorter id.")


def longest_prompt(context_length: int, limit: int = 1 << 32) -> int:
    """Returns the most tokens of a prompt, with room for one of output; ``context_length`` is 0 if unknown."""
    return min(limit, context_length - 1) if context_length else limit


def check_prompt_length(tokens: int, context_length: int, limit: int = 1 << 32) -> None:
    """Checks the number of tokens of a prompt.

    Raises:
        PromptTooLong: it exceeds the operator's limit, or leaves no room for output in the model's context.
    """
    if tokens > limit:
        raise PromptTooLong(tokens, limit)
    if tokens > longest_prompt(context_length):
        raise PromptTooLong.for_model(tokens, context_length)


_HASHES_TAG = tag(LocalHashes, "hashes")


def pack_local_hashes(message: LocalHashes) -> bytes:
    """Returns the hashes of a message as a packed buffer."""
    return PackedLocalHashes.FromString(message.SerializeToString()).hashes


def set_local_hashes(message: LocalHashes, packed: bytes) -> None:
    """Sets the hashes of a message, usually a field of another message, to those of a packed buffer."""
    message.ParseFromString(encode_field(_HASHES_TAG, packed))


def pack_sequence_hashes(message: ReassertBooking) -> bytes:
    """Returns the sequence hashes of a booking as a packed buffer."""
    return PackedReassertBooking.FromString(message.SerializeToString()).sequence_hashes


def add_sequence_hashes(message: ReassertBooking, packed: bytes) -> None:
    """Appends the hashes of a packed buffer to the sequence hashes of a booking."""
    message.MergeFromString(PackedReassertBooking(sequence_hashes=packed).SerializeToString())
