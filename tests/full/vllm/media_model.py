"""A tiny Qwen2-VL of random weights, whose text tokens are bytes, and images for it."""

from __future__ import annotations

import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

from ...byte_tokenizer import write_byte_tokenizer

_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>")
_IDS = {name: 256 + number for number, name in enumerate(_SPECIAL)}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 3136, "max_pixels": 1_003_520}


def write_media_model(directory: Path) -> Path:
    """Writes the model without weights. Returns its directory."""
    write_byte_tokenizer(directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] = [{"id": number, "content": name} | plain for name, number in _IDS.items()]
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "in_chans": 3}
    vision |= {"in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config: dict[str, Any] = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    config |= {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16_384}
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False}
    config |= {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, "torch_dtype": "float32"}
    config |= {"image_token_id": _IDS["<|image_pad|>"], "video_token_id": _IDS["<|video_pad|>"], "eos_token_id": None}
    config |= {"vision_start_token_id": _IDS["<|vision_start|>"], "vision_end_token_id": _IDS["<|vision_end|>"]}
    size = {"shortest_edge": _PATCHES["min_pixels"], "longest_edge": _PATCHES["max_pixels"]}
    shared = {"processor_class": "Qwen2VLProcessor", "size": size} | _PATCHES
    files: dict[str, Any] = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE},
        "config.json": config | {"vision_config": vision},
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor"} | shared,
        "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor"} | shared,
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def png(width: int, height: int, *, seed: int, has_alpha: bool = False) -> bytes:
    """Returns an image of random pixels."""
    draw, size = random.Random(seed), width * (4 if has_alpha else 3)
    rows = b"".join(b"\0" + draw.randbytes(size) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 6 if has_alpha else 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
