"""Chats and completions with text, several prompts or several sequences."""
