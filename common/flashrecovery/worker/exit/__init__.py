"""A rank ends before the last step: what it leaves behind, and what is said."""
