"""Disaggregated serving: prefill workers compute prompts for decode workers."""
