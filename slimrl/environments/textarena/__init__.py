"""Games of TextArena, in which each player is a role."""
