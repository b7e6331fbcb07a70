"""A tokenizer whose tokens are bytes, as those of simulated engines with an OpenAI API, and their chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_TEMPLATE = (
    r"{% if tools %}<|tools|>{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}{% endif %}"
    r"{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


_MEDIA_TEMPLATE = (
    r"{% for message in messages %}{{ '<|' + message.role + '|>\n' }}"
    r"{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    r"{% if part.type == 'text' %}{{ part.text }}{% else %}{{ '<|' + part.type + '_pad|>' }}{% endif %}{% endfor %}"
    r"{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def write_byte_tokenizer(directory: Path, *, media: bool = False) -> Path:
    """Writes its files into a directory, and returns the directory.

    With ``media`` it has tokens after the bytes that the template writes for an image, a sound and a video.
    """
    directory.mkdir(exist_ok=True)
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if media:
        tokenizer.add_special_tokens(["<|image_pad|>", "<|audio_pad|>", "<|video_pad|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = _MEDIA_TEMPLATE if media else _TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


def _characters() -> list[str]:
    """Returns the characters by which byte-level tokenizers write the bytes, in the order of the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(0x100)]
