"""Everything known of vLLM, SGLang and TensorRT-LLM.

``events`` reads and writes KV events, ``relay`` follows the sockets of an engine, ``servers`` calls its HTTP API.
The modules beside them have its request fields, chats, salts, transfers and keys.
"""
