"""What a script does that recovery must know of, seen while it runs: named, or refused."""
