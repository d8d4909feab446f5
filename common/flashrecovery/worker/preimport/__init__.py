"""What a standby or zygote imports before it has a rank, and what a start has taken its time for."""
