"""State of a node's ranks in memory that outlives their processes, and the process that holds it; without torch."""
