"""README.md is short, docs/README.md leads to every page, and docs/recipes.md has every command."""

import re
from pathlib import Path

from page_names import command_problem, commands_of

from slimrl.base.folder_lock import LOCK_FILE
from slimrl.cli import COMMANDS, config_app, eval_app, launch_app, resync_app
from slimrl.cli.evaluation import DEFAULT_COMMAND
from slimrl.observability.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
COMMANDS_PAGE = (DOCS / "recipes.md").read_text()
GROUPS = {config_app: "config ", eval_app: "eval ", launch_app: "launch ", resync_app: "resync "}


def links(text: str) -> list[str]:
    """Files to which a page links, pictures left out."""
    return [target for target in re.findall(r"(?<!!)\[[^\]]+\]\(([^)#\s]+)[^)]*\)", text) if "://" not in target]


def test_the_readme_has_at_most_ten_links():
    assert 5 < len(links(README)) <= 10


def test_every_page_is_in_the_list_of_pages_once():
    listed = links((DOCS / "README.md").read_text())
    pages = sorted(page.name for page in DOCS.glob("*.md") if page.name != "README.md")
    assert sorted(listed) == sorted([*pages, "../CONTRIBUTING.md"])


def test_pages_and_pictures_to_which_pages_link_are_there():
    dead = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        targets = re.findall(r"\]\(([^)#\s:]+\.(?:md|png|svg))(?:#[^)]*)?\)", page.read_text())
        dead += [f"{page.name}: {target}" for target in targets if not (page.parent / target).is_file()]
    assert dead == []


def test_the_page_of_commands_has_each_of_them_and_no_other():
    block = COMMANDS_PAGE.partition("\n## Commands\n")[2].split("```")[1]
    named = {words.strip() for words in re.findall(r"^slimrl ((?:[a-z-]+ )+)", block, re.MULTILINE)}
    there = {f"{GROUPS.get(app, '')}{name}".replace(f" {DEFAULT_COMMAND}", "") for app, name, _ in COMMANDS}
    assert named == there


def test_commands_of_the_readme_exist():
    assert [problem for line in commands_of(README) if (problem := command_problem(line))] == []
    assert len(commands_of(README)) > 4


def test_the_files_of_a_run_are_those_of_its_folder():
    table = COMMANDS_PAGE.partition("## The folder of a run")[2].partition("\n## ")[0]
    run = RunFolder(Path())
    there = {str(path) for path in vars(run).values() if isinstance(path, Path)} | {LOCK_FILE}
    rows = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    named = {name.rstrip("/") for row in rows for name in re.findall("`(.*?)`", row)}
    assert len(named) > 10
    assert named <= there
