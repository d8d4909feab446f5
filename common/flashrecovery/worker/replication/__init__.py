"""Which copies this rank keeps of its own and of its peers' state, and when."""
