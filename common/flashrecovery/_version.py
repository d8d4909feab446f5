"""The version, for code that must not import the public API."""

__version__ = "0.1.0"
