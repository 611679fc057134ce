"""Docstrings of tools: what `config check` says of the source is what the start says of the function."""

import ast
import inspect

import pytest

from slimrl.agent.tools import make_tool
from slimrl.config.signatures import tool_problems

NUMPY = "in NumPy's style, which the model would be told as words. Write the parameters below `Args:`"
TYPED = "its docstring describes item with a type; write `item: What it is.`"


@pytest.mark.parametrize(
    ("docstring", "problem"),
    [
        ("Args:\n    item: The name.", ""),
        ("Args:\n    item: The name,\n        in words.\n\nReturns:\n    What was found.", ""),
        ("Limits\n------\nTen calls.\n\nArgs:\n    item: The name.", ""),
        ("Args:\n    item : str\n        The name.", TYPED),
        ("Args:\n    item (str): The name.", TYPED),
        ("Args:\n    item (str, optional) : The name.", TYPED),
        ("Parameters\n----------\nitem : str\n    The name.", f"has a section Parameters {NUMPY}"),
        ("Args:\n    item: The name.\n\nReturns\n-------\nstr\n    What was found.", f"has a section Returns {NUMPY}"),
        ("item: The name.", "its docstring does not describe item in a section `Args:`."),
        (":param item: The name.", "its docstring does not describe item in a section `Args:`."),
        ("Args:\n    name: The name.\n\nReturns:\n    item: What was found.", "does not describe item"),
    ],
)
def test_a_docstring_that_the_model_would_be_told_wrongly_is_refused(docstring, problem):
    text = inspect.cleandoc(f"Look it up.\n\n{docstring}")
    source = f"def look(item: str) -> str:\n    {text!r}\n    return item\n"
    from_source = list(tool_problems(ast.parse(source).body[0], ()))
    names: dict = {"__name__": "own"}
    exec(source, names)
    if not problem:
        properties = make_tool(names["look"]).schema["function"]["parameters"]["properties"]
        assert (from_source, properties["item"]["description"].startswith("The name")) == ([], True)
        return
    with pytest.raises(ValueError, match="tool own:look: ") as error:
        make_tool(names["look"])
    assert [problem in said for said in (str(error.value), *from_source)] == [True, True]


def test_parameters_that_the_model_does_not_give_need_no_description():
    text = "Look it up.\n\nArgs:\n    item: The name."
    source = f"def look(item: str, corpus: str) -> str:\n    {text!r}\n"
    assert list(tool_problems(ast.parse(source).body[0], ["corpus"])) == []
    names: dict = {"__name__": "own"}
    exec(source, names)
    shown = make_tool(names["look"], {"corpus": "x"}).schema["function"]["parameters"]["properties"]
    assert shown == {"item": {"type": "string", "description": "The name."}}
