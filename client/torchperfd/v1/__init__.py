"""Version 1 of the protocol between client, daemon and CLI.

The ``*_pb2*`` modules are generated from ``protos/`` (``make protos``);
:mod:`torchperfd.v1.contract` holds the rest of the contract, which protobuf
cannot express.
"""
