"""The controller as a service: sessions, messages in and out, heartbeats, status, the console."""
