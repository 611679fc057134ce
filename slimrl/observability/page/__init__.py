"""One HTML page that shows what happened in runs (docs/observing.md#a-page-of-a-run).

1. `run_files.py` beside this package reads a run's folder; `run_state.py` there, and here `findings.py`, `settings.py`,
   `panels.py`, `times.py` and `experts.py` each make the data of a part of the page from it, as plain JSON values.
2. `conversations.py` reads the trajectories; `packed.py` packs each for itself; the page unpacks what it shows.
3. `document.py` puts data, scripts and style into `page.html`. For runs that go on `follower.py` makes the data again
   when files change, and `server.py` gives the same page, whose `follow.js` asks for them.
4. No text of a run becomes markup: the data is JSON of ASCII alone without `<`, `>` and `&`, the scripts set it as
   text, and a policy of the page allows no other script and no network but that server.
"""
