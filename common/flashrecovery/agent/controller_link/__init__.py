"""The agent's connection to the controller: made, watched, made again; and whom this node follows when it is lost."""
