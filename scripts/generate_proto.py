"""Generate the Python code of common/flashrecovery/proto/flashrecovery.proto (needs the `test` extra)."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent / "common"


def main() -> int:
    return int(
        protoc.main(
            [
                "protoc",
                f"-I{ROOT}",
                f"--python_out={ROOT}",
                f"--grpc_python_out={ROOT}",
                f"--mypy_out={ROOT}",
                "flashrecovery/proto/flashrecovery.proto",
            ]
        )
    )


if __name__ == "__main__":
    sys.exit(main())
