"""A running job changes its parallel layout: which one, when, and how its state gets there."""
