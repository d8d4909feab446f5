"""The control thread, and where it meets the training thread: tags, stops, faults, overhead."""
