"""Games of TextWorldExpress (arXiv:2208.01174), which run in Java.

1. `java.py` starts one Java machine for all trajectories of a process, and what connects to it.
2. `game.py` has one game in it, and `environment.py` its episode.
3. `data.py` draws games, and `walkthrough.py` finds what solves them.
"""
