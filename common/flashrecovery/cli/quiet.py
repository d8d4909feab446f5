"""What strangers do shall not fill the log (:mod:`flashrecovery.complaints`), nor what gRPC's C++ part says of it."""

from __future__ import annotations

import os

_VERBOSITY = "GRPC_VERBOSITY"


def import_grpc() -> None:
    """For the first time in this process. gRPC's core writes a line to stderr for each malformed header, past every
    logger; it looks at the environment when it is imported. Training processes, which inherit that, may use it, too."""
    if _VERBOSITY in os.environ:
        return
    os.environ[_VERBOSITY] = "NONE"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_VERBOSITY]
