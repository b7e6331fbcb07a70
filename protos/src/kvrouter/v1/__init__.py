"""The contract: the messages of ``kvrouter/v1/*.proto``, and in ``names`` the etcd keys, streams and subjects."""
