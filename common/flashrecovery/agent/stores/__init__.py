"""What an agent hosts for the job: the TCPStore, and memory for state that outlives its workers."""
