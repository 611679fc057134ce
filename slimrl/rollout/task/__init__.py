"""Loading and checking what a recipe names for its rollouts: data, tools, environment, rewards."""
