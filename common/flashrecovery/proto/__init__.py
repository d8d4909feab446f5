"""The messages between controller, agents and workers; ``flashrecovery.proto`` is the contract.

``scripts/generate_proto.py`` makes the ``_pb2`` modules from it.
"""

CHANNEL_OPTIONS = (
    (
        "grpc.enable_http_proxy",
        0,
    ),  # agents and controller are inside the cluster; an http_proxy is for the world outside
    ("grpc.max_receive_message_length", 256 << 20),
)
"""Options of every channel to a controller."""
