"""Scripted players of ALFWorld's games: the same as TextWorld's, with the planner's plan as the walkthrough."""

from slimrl.environments.textworld.players import RandomPlayer, Solver

__all__ = ["RandomPlayer", "Solver"]
