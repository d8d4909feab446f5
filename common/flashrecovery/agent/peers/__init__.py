"""What agents do for each other: vouch, vote, relay sessions, keep set-up logs and staged state."""
