"""From which version a job goes on, and which rank gives which shard to which. Pure."""
