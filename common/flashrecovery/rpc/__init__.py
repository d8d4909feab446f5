"""How the processes of a job talk over the network: channels, token, TLS, sealed messages."""
