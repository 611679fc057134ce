"""Whether the docstring of a tool tells the model of its parameters.

transformers reads docstrings in Google's style: `Args:`, and below it `item: What it is.` It takes what it does not
know for a part of the description before it.
"""

import re
from collections.abc import Iterator, Sequence

_ARGS = re.compile(r"\n\s*Args:\n(.*?)(?=\n\s*(?:Returns:|Raises:)|\Z)", re.DOTALL)
_UNDERLINED = re.compile(
    r"^[ \t]*((?:Other )?Parameters|Returns|Yields|Receives|Raises)[ \t]*\n[ \t]*-{3,}[ \t]*$", re.MULTILINE
)
"""A section in NumPy's style"""


def docstring_problems(told: str, names: Sequence[str]) -> Iterator[str]:
    """
    Args:
        told: a docstring without its indentation.
        names: parameters that the model gives.
    """
    if underlined := _UNDERLINED.search(told):
        yield (
            f"its docstring has a section {underlined[1]} in NumPy's style, which the model would be told as "
            "words. Write the parameters below `Args:`, as `item: What it is.`"
        )
        return
    section = "".join(_ARGS.findall(told))
    for name in names:
        found = re.search(rf"^\s*{re.escape(name)}(?P<typed> *\(.*\) *| +)?:", section, re.MULTILINE)
        if found is None:
            yield f"its docstring does not describe {name} in a section `Args:`."
        elif found["typed"]:
            yield f"its docstring describes {name} with a type; write `{name}: What it is.` and annotate the type."
