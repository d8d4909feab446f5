"""Parity: what is added to what, which rank holds it, and what it can give back. Pure."""
