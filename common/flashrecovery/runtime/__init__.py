"""What a process shares with its neighbours on the host: page, lifeline, channel, addresses, environment. No torch."""
