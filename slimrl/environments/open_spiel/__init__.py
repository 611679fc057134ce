"""Games of OpenSpiel, in which each player is a role."""
