"""What the text of a script says of its loop: variables, frames, collectives. Nothing is run."""
