"""KV events of engines: reads their formats, translates them into calls of the SDK, and writes vLLM's format."""
