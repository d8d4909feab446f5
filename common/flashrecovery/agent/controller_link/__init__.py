"""The agent's connection to the controller: made, watched, made again; and which controller this node follows when it
is lost."""
