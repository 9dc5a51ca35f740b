#!/usr/bin/env bash
# Regenerate client/torchperfd/v1 from protos/. The generator is pinned: code from
# grpcio-tools 1.63.2 is the newest that still imports on protobuf 4.25, and it also
# imports on every later protobuf; CI imports it on both ends of the range.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${TORCHPERFD_PROTO_VENV:-$PWD/.venv-protos}
if [ ! -x "$venv/bin/protoc-gen-mypy_grpc" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q grpcio-tools==1.63.2 mypy-protobuf==3.6.0 "setuptools<81" "protobuf<6"
fi
rm -f client/torchperfd/v1/*_pb2*.py client/torchperfd/v1/*_pb2*.pyi
PATH="$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc -Iprotos \
  --python_out=client --grpc_python_out=client --mypy_out=client --mypy_grpc_out=client \
  protos/torchperfd/v1/*.proto
# A proto file without a service yields an empty gRPC module; none of ours is.
# The last class of a gRPC module makes calls without a channel of ours; nothing here does.
sed -i '/^ # This class is part of an EXPERIMENTAL API\.$/,$d' client/torchperfd/v1/*_pb2_grpc.py
