"""Keeps gRPC's C++ part from filling the log with what strangers send (:mod:`.log_throttle` does so for
Python's)."""

from __future__ import annotations

import os

_VERBOSITY = "GRPC_VERBOSITY"


def import_grpc() -> None:
    """Import grpc for the first time in this process, silenced. gRPC's core writes a line to stderr for each malformed
    header, past every logger; it reads its setting when it is imported. The environment is put back afterwards:
    training processes inherit it, and may use gRPC themselves."""
    if _VERBOSITY in os.environ:
        return
    os.environ[_VERBOSITY] = "NONE"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_VERBOSITY]
