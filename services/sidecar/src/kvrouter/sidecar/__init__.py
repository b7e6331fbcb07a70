"""The sidecar: serves an unchanged vLLM or SGLang server as a worker."""
