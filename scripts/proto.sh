#!/usr/bin/env bash
# Generates the Python stubs with their types from proto/ into clients/python/kvshuttle/v1.
# `scripts/proto.sh --check` generates into a temporary folder and fails when the committed ones differ.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
committed=clients/python/kvshuttle/v1
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$bin/python" -m grpc_tools.protoc -Iproto \
  --plugin=protoc-gen-mypy="$bin/protoc-gen-mypy" \
  --plugin=protoc-gen-mypy_grpc="$bin/protoc-gen-mypy_grpc" \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
  proto/kvshuttle/v1/*.proto
# Files without a service have an empty gRPC module.
rm -f "$out"/kvshuttle/v1/types_pb2_grpc.py*
if [ "${1:-}" = "--check" ]; then
  if ! diff -r -x __pycache__ -x __init__.py -x py.typed "$out/kvshuttle/v1" "$committed"; then
    echo "The committed stubs differ from proto/: run 'make proto' and commit." >&2
    exit 1
  fi
else
  mkdir -p "$committed"
  rm -f "$committed"/*_pb2*.py "$committed"/*_pb2*.pyi
  cp "$out"/kvshuttle/v1/* "$committed"/
fi
