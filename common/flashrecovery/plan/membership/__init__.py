"""Which nodes belong to the job and which of them is used: leases, liveness, electors, placement. Pure."""
