"""The version, for all who must not import the public API."""

__version__ = "0.1.0"
