"""State is sharded otherwise: in another size, or in another parallel layout."""
