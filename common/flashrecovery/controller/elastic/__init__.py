"""An elastic job changes its size: which ranks leave, which join, at which step."""
