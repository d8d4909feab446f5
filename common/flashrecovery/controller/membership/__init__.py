"""Which process fills which rank, on which node: launch, admission, placement, joining processes."""
