"""Text in and out: chat templates, tokenization, incremental detokenization, stop strings."""
