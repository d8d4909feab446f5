"""The global service: membership, detection, the recovery state machine, the rank table."""
