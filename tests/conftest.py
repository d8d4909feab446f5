"""What holds in all tests."""

from __future__ import annotations

from tests.support.validated import install

install()
