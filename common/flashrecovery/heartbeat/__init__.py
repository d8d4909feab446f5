"""Heartbeats as datagrams, in both directions: thousands of agents cost the controller a fraction of a core.

A heartbeat on an agent's gRPC stream costs about ten times as much as a datagram. So the controller invites every agent
that connects (:class:`~.receiver.HeartbeatReceiver`), the agent sends its heartbeats to the UDP
port with the number of the controller's TCP port (:class:`~.sender.HeartbeatSender`), and each
is answered: the answer is the controller's own heartbeat. Whether datagrams get through is seen by the answers. While
they do not, the heartbeats on the stream go on, in both directions; nothing needs to be configured.
"""
