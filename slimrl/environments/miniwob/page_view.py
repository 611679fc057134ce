"""What a page shows, as text: its accessibility tree, or a list of the elements that can be used.

BrowserGym's helpers number the elements, read the tree, and say which elements are visible and usable.
"""

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from browsergym.core import observation
from browsergym.utils.obs import IGNORED_AXTREE_PROPERTIES, IGNORED_AXTREE_ROLES, flatten_axtree_to_str
from playwright.sync_api import Page

from slimrl.environments.miniwob.page_script import HINTS, LISTS

_MIN_VISIBLE = 0.5
"""Part of an element that is seen if it is visible, as BrowserGym has it"""
_USABLE = "element"
"""Role that is shown of an element that can be used and has none, such as a `div` with a handler of clicks"""
_NO_ROLES = {"generic", "none"}
_SHOWN_STATES = ("checked", "selected", "expanded", "disabled", "focused")

Node = dict[str, Any]


class View(str, Enum):
    axtree = "axtree"
    """The accessibility tree of what is visible"""
    set_of_marks = "set_of_marks"
    """A line for each visible element that can be used"""


@dataclass(frozen=True, kw_only=True)
class PageView:
    text: str
    elements: frozenset[int]
    """Numbers of the elements that the text shows"""


def read_page(page: Page, view: View) -> PageView:
    """Number the new elements of a page, and say what it shows."""
    observation._pre_extract(page)
    try:
        snapshot = observation.extract_dom_snapshot(page)
        tree = observation.extract_merged_axtree(page)
        hints, lists = page.evaluate(HINTS), page.evaluate(LISTS)
    finally:
        observation._post_extract(page)
    facts = observation.extract_dom_extra_properties(snapshot, 1.0)
    tree_view = _Tree(tree, facts, hints, lists)
    return tree_view.whole() if view is View.axtree else tree_view.marks()


class _Tree:
    """An accessibility tree whose elements say what they are: without a name by a hint, lists by their options."""

    def __init__(
        self, tree: dict[str, Any], facts: dict[str, Any], hints: dict[str, str], lists: dict[str, list[str]]
    ) -> None:
        self._tree, self._facts = tree, facts
        self._nodes = {node["nodeId"]: node for node in tree["nodes"]}
        for node in self._nodes.values():
            bid = node.get("browsergym_id", "")
            if self._is_mark(node) and _role(node) in _NO_ROLES:
                node["role"]["value"] = _USABLE
                node["name"]["value"] = self._text(node)
            if "name" in node and not _name(node) and _role(node) not in _NO_ROLES and not self._text(node):
                node["name"]["value"] = hints.get(bid, "")
            if bid in lists:
                node.setdefault("properties", []).append({"name": "options", "value": {"value": lists[bid]}})

    def whole(self) -> PageView:
        text = flatten_axtree_to_str(
            self._tree,
            self._facts,
            filter_visible_only=True,
            ignored_roles=[*IGNORED_AXTREE_ROLES, "InlineTextBox", "MenuListPopup"],
            ignored_properties=[
                *IGNORED_AXTREE_PROPERTIES,
                "url",
                "orientation",
                "multiselectable",
                "controls",
                "hasPopup",
            ],
        )
        # The first line is the document itself, whose title says the task's name.
        lines = [line.removeprefix("\t") for line in text.splitlines()[1:] if line.strip() != "StaticText ''"]
        elements = {int(bid) for bid, facts in self._facts.items() if bid.isdecimal() and _is_visible(facts)}
        return PageView(text="\n".join(lines), elements=frozenset(elements))

    def marks(self) -> PageView:
        nodes = [node for node in self._in_order(self._tree["nodes"][0]) if self._is_mark(node)]
        text = "\n".join(map(self._line, nodes))
        return PageView(text=text, elements=frozenset(int(node["browsergym_id"]) for node in nodes))

    def _line(self, node: Node) -> str:
        line = f"[{node['browsergym_id']}] {_role(node)} {_quoted(_name(node) or self._text(node))}"
        if (value := node.get("value", {}).get("value")) not in (None, ""):
            line += f" value={_quoted(value)}"
        for state in node.get("properties", []):
            if state["name"] == "options":
                line += f" options={_quoted(state['value']['value'])}"
            if state["name"] in _SHOWN_STATES and state["value"].get("value") in (True, "true", "mixed"):
                line += f" {state['name']}"
        return line

    def _in_order(self, node: Node) -> list[Node]:
        found = [node]
        for child in node["childIds"]:
            if child in self._nodes:
                found += self._in_order(self._nodes[child])
        return found

    def _text(self, node: Node) -> str:
        words = [_name(one).strip() for one in self._in_order(node) if _role(one) == "StaticText"]
        return " ".join(filter(None, words))

    def _is_mark(self, node: Node) -> bool:
        bid = node.get("browsergym_id", "")
        facts = self._facts.get(bid)
        if not bid.isdecimal() or facts is None or "name" not in node:
            return False
        return bool(facts["set_of_marks"]) and _is_visible(facts)


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_visible(facts: dict[str, Any]) -> bool:
    return (facts["visibility"] or 0.0) >= _MIN_VISIBLE


def _role(node: Node) -> str:
    role: str = node["role"]["value"]
    return role


def _name(node: Node) -> str:
    name: str = node.get("name", {}).get("value", "")
    return name
