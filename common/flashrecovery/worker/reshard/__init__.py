"""State is divided otherwise: in another size, or in another parallel layout."""
