"""What holds in all tests."""

from __future__ import annotations

from hypothesis import settings

from tests.support.validated import install

settings.register_profile("busy machines", deadline=None)  # a timing decides no test
settings.load_profile("busy machines")

install()
