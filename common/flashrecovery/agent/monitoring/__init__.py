"""What an agent notices on its node and reports: heartbeats, hangs, device health, preemption, injected faults."""
