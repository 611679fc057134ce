"""Layout of the trainer's ranks: process groups, a fake world for planning, and the ranks that hold each weight."""
