"""The HTTP API of SGLang."""
