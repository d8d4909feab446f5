"""An elastic job changes its size: who leaves, who joins, at which step."""
