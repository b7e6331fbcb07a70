"""Discovery of workers and services, from etcd or from a static list."""
