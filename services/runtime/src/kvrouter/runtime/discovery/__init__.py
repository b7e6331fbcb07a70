"""Which workers and services there are: from etcd, or from a static list."""
