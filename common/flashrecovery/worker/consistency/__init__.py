"""What ranks must have alike, and how they show each other that they do."""
