"""Reads a page that follows a run, and says what stayed as it was when data came: `drive_followed_page.py ADDRESS`.

It prints a line when the page is as a reader has put it, and waits for a line on its input before it looks again, and
so on for each question; the last line has all that was seen. It runs in the virtual environment of miniwob.
"""

import json
import sys

from page_controls import opened, use_all, wait_until

LOOK = """() => ({
    version: DATA.version,
    state: document.querySelector('.badge').textContent,
    hash: location.hash,
    hidden: [...document.querySelectorAll('#tabs a')].filter((one) => one.hidden).map((one) => one.hash),
    part: [...document.querySelectorAll('main > section')].find((one) => !one.hidden).id,
    chosen: table.chosen < 0 ? null : keyOf(table.chosen),
    detail: document.getElementById('detail').innerText,
    view: (document.querySelector('#detail [aria-pressed=true]') || {}).textContent,
    steps: [...new Set(COLUMNS.step)],
    filter: ['run', 'reward'].map((name) => document.getElementById('filter-' + name).value),
    rows: NUM_ROWS,
    shown: table.rows.length,
    found: document.getElementById('search').value,
    smoothing: document.getElementById('smoothing').value,
    logs: [...document.querySelectorAll('.panel button[aria-pressed=true]')].length,
    curve: [...(document.querySelector('#panels .js-plotly-plot') || { data: [] }).data].map((one) => one.x.length),
    range: (document.querySelector('#panels .js-plotly-plot') || { layout: { xaxis: {} } }).layout.xaxis.range,
    scroll: scrollY,
    open: [...document.querySelectorAll('#part-overview details')].map((one) => one.open),
    tableScroll: document.getElementById('table').scrollTop,
    status: document.getElementById('follow').textContent,
})"""


def await_step(page, step: int) -> None:
    wait_until(page, f"RUNS[0].state.step >= {step}")
    page.wait_for_timeout(700)


def told() -> int:
    """The step of the first run that the page is to have before it is looked at."""
    return int(sys.stdin.readline())


def say(what: str) -> None:
    print(json.dumps({"ready": what}), flush=True)


def main() -> None:
    seen: dict = {}
    with opened(sys.argv[1], 1300, "light", seen) as page:
        page.wait_for_selector(".badge")
        page.click("#part-overview details:not([open]) summary >> nth=0")
        page.evaluate("scrollTo(0, 120)")
        page.wait_for_timeout(200)
        seen["starting"] = page.evaluate(LOOK)
        say("starting")

        await_step(page, told())
        seen["overview_after"] = page.evaluate(LOOK)
        page.evaluate("location.hash = '#curves'")
        page.wait_for_selector("#panels .js-plotly-plot")
        page.evaluate("""() => {
            const slider = document.getElementById('smoothing');
            slider.value = '0.5';
            slider.dispatchEvent(new Event('input'));
            document.querySelector('.panel button').click();
            scrollTo(0, 150);
        }""")
        page.wait_for_timeout(400)
        seen["curves"] = page.evaluate(LOOK)
        say("curves")
        await_step(page, told())
        seen["curves_after"] = page.evaluate(LOOK)

        page.evaluate("location.hash = '#trajectories'")
        page.select_option("#filter-run", "1")
        page.select_option("#filter-reward", "positive")
        page.click("#table-body .row >> nth=2")
        page.wait_for_selector("[data-view=tokens]")
        page.click("[data-view=tokens]")
        page.wait_for_selector(".tokens span")
        page.click(".tokens span >> nth=5")
        page.evaluate("document.getElementById('table').scrollTop = 40")
        page.wait_for_timeout(200)
        seen["trajectories"] = page.evaluate(LOOK)
        say("trajectories")
        await_step(page, told())
        seen["trajectories_after"] = page.evaluate(LOOK)

        # A trajectory that came with the newest step.
        page.evaluate("location.hash = '#trajectories/' + (NUM_ROWS - 1)")
        wait_until(page, "detail.part === COLUMNS.part[NUM_ROWS - 1]")
        seen["newest"] = page.evaluate(LOOK)
        page.fill("#search", "<svg/onload=window.harmed=1>")
        page.wait_for_timeout(500)
        wait_until(page, "!table.isSearching")
        seen["search"] = page.evaluate(LOOK)
        page.click("#clear-filters")
        seen["used"] = {}
        for part in ("overview", "time", "experts"):
            page.evaluate(f"location.hash = '#{part}'")
            page.wait_for_timeout(500)
            seen["used"][part] = use_all(page, f"#part-{part}")
        seen["harmed"] = page.evaluate("window.harmed === undefined ? 0 : window.harmed")
        seen["errors_before_end"] = list(seen["errors"])
        say("ending")
        sys.stdin.readline()
        # It asks twice before it says that nobody answers.
        wait_until(page, "document.getElementById('follow').textContent.startsWith('not followed')")
        seen["ended"] = page.evaluate(LOOK)
    print(json.dumps(seen), flush=True)


main()
