"""Planning tools: what a job survives, what copies cost, how much time failures take. Pure."""
