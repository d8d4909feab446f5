"""One step as a transaction: begin, mutation, seal, commit; and how an attempt that does not count is taken back."""
