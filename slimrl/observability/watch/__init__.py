"""`slimrl watch`: a run on the terminal, from its folder alone (docs/observing.md#watch-a-run).

1. `view.py` reads the folder again whenever its files have changed.
2. `frame.py` arranges what `curves.py`, `present.py`, `speed.py` and `answers.py` show of it.
3. `screen.py` draws frames until the run ends.
"""
