"""What the controller knows of the job, as data, and the pure decisions on it."""
