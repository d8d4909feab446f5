"""The loops of a script that hands out no steps itself, taken as they stand."""
