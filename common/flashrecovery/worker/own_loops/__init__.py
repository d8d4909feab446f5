"""The loops of a script that yields no steps itself, taken as they are."""
