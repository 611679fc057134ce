"""The tools of software repair: what the policy is shown of them, and the program that edits a file."""

from typing import Any

EDIT = """
import json, sys
given = json.load(sys.stdin)
path, old, new = given["path"], given["old"], given["new"]
try:
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
except (OSError, UnicodeDecodeError) as error:
    sys.exit(f"error: {path} cannot be read: {error}")
number = text.count(old)
if number != 1:
    sys.exit(f"error: `old` occurs {number} times in {path}, and must occur once: give more lines around it")
try:
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text.replace(old, new))
except OSError as error:
    sys.exit(f"error: {path} cannot be written: {error}")
print(f"{path} was edited")
"""


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool(
        "bash",
        "Run shell commands in the package's folder. Files stay; directory and variables do not.",
        command="One or more commands of bash.",
    ),
    _tool(
        "edit",
        "Replace a text that occurs exactly once in a file.",
        path="Path of the file in the package's folder.",
        old="The text to replace, with its indentation.",
        new="The text that takes its place.",
    ),
    _tool("submit", "Say that the repair is complete. The tests run, and nothing can be changed any more."),
]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}


def problem(name: str, arguments: dict[str, Any]) -> str | None:
    """What is wrong with a call; None if nothing is."""
    if name not in PARAMETERS:
        return f"there is no tool {name}; there are {', '.join(PARAMETERS)}"
    wanted = PARAMETERS[name]
    if set(arguments) != set(wanted) or not all(isinstance(value, str) for value in arguments.values()):
        return f"{name} takes {', '.join(wanted) or 'nothing'}, as text"
    return None
