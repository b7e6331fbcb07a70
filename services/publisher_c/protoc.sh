#!/bin/sh
# Runs protoc: the installed one, otherwise that of grpcio-tools, which `make setup` installs.
if command -v protoc >/dev/null; then
    exec protoc "$@"
fi
exec "$(dirname "$0")/../../.venv/protoc/bin/python" -m grpc_tools.protoc "$@"
