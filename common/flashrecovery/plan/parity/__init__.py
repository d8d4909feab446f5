"""Parity: what is added to what, who holds it, and what it can give back. Pure."""
