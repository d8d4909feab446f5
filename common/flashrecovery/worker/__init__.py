"""Inside a training process: step tags, the step transaction, restore, rollback."""
