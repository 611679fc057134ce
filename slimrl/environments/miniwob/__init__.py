"""MiniWoB++ (github.com/Farama-Foundation/miniwob-plusplus): web pages with a task each, in Debian's chromium.

1. `chromium.py` starts one chromium for all trajectories of a process; `chromium_keeper.py` is what ends it.
2. `page_view.py` reads a page with BrowserGym's helpers and says it as text; `page_script.py` is what runs in the page.
3. `actions.py` reads the policy's action, and `environment.py` has the episode.
"""
