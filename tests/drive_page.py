"""Opens a page of runs in chromium, uses it, and prints what was seen: `drive_page.py FILE WIDTH SCHEME CONTROLS`.

With `all` as CONTROLS every control is used; else parts and trajectories are looked at.

It runs in the virtual environment of miniwob, which has playwright.
"""

import json
import sys

from page_controls import PARTS, opened, too_wide, use_all


def main() -> None:
    file, width, scheme = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    seen: dict = {"used": {}}
    with opened(f"file://{file}", width, scheme, seen) as page:
        # Before the trajectories were looked at.
        page.evaluate("showStep(RUNS[0].name, 2)")
        first_step = page.evaluate("document.getElementById('filter-step').value")
        page.goto("about:blank")
        page.goto(f"file://{file}")
        seen["theme"] = page.evaluate("document.documentElement.dataset.theme")
        for part in PARTS:
            page.evaluate(f"location.hash = '#{part}'")
            page.wait_for_timeout(300)
            if sys.argv[4] == "all":
                seen["used"][part] = use_all(page, f"#part-{part}")
            seen.setdefault("too_wide", {})[part] = too_wide(page)
        page.click("#theme")
        seen["theme_after"] = page.evaluate("document.documentElement.dataset.theme")

        page.evaluate("location.hash = '#trajectories'")
        page.click("#clear-filters")
        page.click("#table-body .row >> nth=0")
        page.wait_for_selector("[data-view=conversation]")
        page.keyboard.press("j")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("k")
        page.wait_for_timeout(200)
        seen["row"] = page.evaluate("location.hash")
        page.click("[data-view=conversation]")
        page.evaluate("location.hash = '#trajectories/1'")
        page.wait_for_timeout(400)
        page.evaluate("document.querySelectorAll('#detail details').forEach((one) => { one.open = true; })")
        seen["conversation"] = page.inner_text("#detail")
        page.click("[data-view=tokens]")
        page.wait_for_selector(".tokens span")
        seen["tokens"] = page.evaluate("[...document.querySelectorAll('.tokens span')].map((one) => one.textContent)")
        tints = "new Set([...document.querySelectorAll('.tokens span')].map((one) => one.style.backgroundColor)).size"
        names = page.evaluate("[...document.querySelectorAll('#quantity option')].map((one) => one.value)")
        seen["tints"] = {}
        for name in names:
            page.select_option("#quantity", name)
            seen["tints"][name] = page.evaluate(tints)
        page.click(".tokens span >> nth=30")
        seen["token"] = page.inner_text(".token-info")
        page.click("[data-view=group]")
        page.wait_for_selector(".member")
        seen["members"] = page.evaluate("document.querySelectorAll('.member').length")
        page.click("#largest-gaps")
        page.wait_for_timeout(300)
        seen["first_gap"] = page.evaluate("Number(document.querySelector('#table-body .row').dataset.row)")
        page.fill("#search", "<svg/onload=window.harmed=1>")
        for _ in range(100):
            page.wait_for_timeout(100)
            seen["found"] = page.inner_text("#counts")
            if "searching" not in seen["found"]:
                break
        page.wait_for_timeout(500)
        seen["found"] = page.inner_text("#counts")
        page.evaluate("location.hash = '#curves'")
        page.fill("#find-panel", "entropy")
        page.wait_for_timeout(600)
        point = page.locator("#panels .card:not([hidden]) .scatterlayer .points path").nth(1)
        seen["panels"] = page.evaluate("document.querySelectorAll('#panels .card:not([hidden])').length")
        box = point.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_timeout(300)
        seen["hover"] = page.evaluate(
            "[...document.querySelectorAll('.hoverlayer text')].map((one) => one.textContent)"
        )
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_timeout(500)
        page.evaluate("curveSettings.band = false")
        bars = "curveTraces('eval/heldout/accuracy', 0, colour(0), 'solid', '').map((one) => one.error_y.array)"
        seen["bars"] = page.evaluate(bars)
        seen["step"] = page.evaluate("document.getElementById('filter-step').value")
        seen["first_step"] = first_step
        seen["harmed"] = page.evaluate("window.harmed === undefined ? 0 : window.harmed")
        seen["elements"] = page.evaluate("document.querySelectorAll('img[onerror], iframe, svg[onload], b b').length")
    print(json.dumps(seen))


main()
