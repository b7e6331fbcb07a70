"""What a request says: its prompt as hashes, and how it is to be routed."""
