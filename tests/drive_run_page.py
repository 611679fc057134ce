"""Uses every control of a page of runs, and prints what was seen of it: `drive_run_page.py FILE`.

It runs in the virtual environment of miniwob, which has playwright.
"""

import json
import sys

from page_controls import PARTS, opened, too_wide, use_all, wait_until


def main() -> None:
    seen: dict = {"used": {}, "too_wide": {}, "texts": {}, "views": {}}
    with opened(f"file://{sys.argv[1]}", 1300, "light", seen) as page:
        for part in PARTS:
            if page.evaluate(f"document.querySelector('#tabs a[href=\"#{part}\"]').hidden"):
                continue
            page.evaluate(f"location.hash = '#{part}'")
            page.wait_for_timeout(300)
            seen["texts"][part] = page.inner_text(f"#part-{part}")
            seen["used"][part] = use_all(page, f"#part-{part}")
            seen["too_wide"][part] = too_wide(page)
        # Trajectories of the first step and of the last evaluation.
        rows = list(range(page.evaluate("NUM_ROWS")))
        for row in dict.fromkeys(rows[:12] + rows[-4:]):
            page.evaluate(f"setView('conversation'); location.hash = '#trajectories/{row}'")
            wait_until(page, f"detail.part === COLUMNS.part[{row}]")
            page.evaluate("document.querySelectorAll('#detail details').forEach((one) => { one.open = true; })")
            images = "[...document.querySelectorAll('#detail img')]"
            page.evaluate(f"{images}.forEach((one) => {{ one.loading = 'eager'; }})")
            wait_until(page, f"{images}.every((one) => one.complete)")
            shown = page.evaluate("""() => ({
                set: COLUMNS.set[table.chosen],
                text: document.getElementById('detail').innerText,
                subagents: [...document.querySelectorAll('#detail .subagent')].map((one) => one.innerText),
                images: [...document.querySelectorAll('#detail img')].map((one) => one.naturalWidth),
                views: [...document.querySelectorAll('#detail [data-view]')].map((one) => one.textContent),
            })""")
            if "tokens" in shown["views"]:
                page.click("[data-view=tokens]")
                page.wait_for_selector(".tokens span")
                shown["segments"] = page.evaluate(
                    "[...document.querySelectorAll('.tokens h3')].map((one) => one.textContent)"
                )
            seen["views"][str(row)] = shown
    print(json.dumps(seen))


main()
