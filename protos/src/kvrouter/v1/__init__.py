"""The contract: the messages of ``kvrouter/v1/*.proto``, and in ``names`` the keys, streams and subjects."""
