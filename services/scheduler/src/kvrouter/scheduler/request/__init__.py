"""A request's content: its prompt as hashes, and its routing options."""
