"""The training processes of one node: where they come from, how they are started, watched, halted and buried."""
