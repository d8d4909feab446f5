"""From which version a job goes on, and who gives which shard to whom. Pure."""
