"""The messages between controller, agents and workers; ``flashrecovery.proto`` is the contract.

``scripts/generate_proto.py`` makes the ``_pb2`` modules from it.
"""

import json

_MESSAGE_BYTES = ("grpc.max_receive_message_length", 256 << 20)
_ANSWER_BYTES = 4096
"""The largest message that is taken from a listener that has not proven itself yet."""
_HELLO = {"name": [{"service": "flashrecovery.v1.Entrance"}], "maxResponseMessageBytes": _ANSWER_BYTES}

# Agents and controller are inside the cluster; an http_proxy is for the world outside.
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config", json.dumps({"methodConfig": [_HELLO]})),
    _MESSAGE_BYTES,
)
"""Options of every channel to a controller or an agent."""
SERVER_OPTIONS = (("grpc.so_reuseport", 0), _MESSAGE_BYTES)
"""Options of a controller's or an agent's server."""
