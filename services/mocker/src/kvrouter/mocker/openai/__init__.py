"""The OpenAI API over the simulated engine, as far as vLLM and SGLang serve it alike."""
