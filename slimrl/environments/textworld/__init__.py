"""Games that TextWorld makes, and what all games played by its package have in common."""
