"""Parity in a running job: made, stored, decoded."""
