"""Calls of a conversation against the tools of its own row."""

import pytest

from slimrl.agent.call_schemas import refuse_wrong_calls

PARAMETERS = {
    "type": "object",
    "properties": {"amount": {"type": "number"}, "to": {"type": "string"}},
    "required": ["amount"],
}


def tool(parameters=PARAMETERS):
    return {"type": "function", "function": {"name": "convert", "parameters": parameters}}


def turns(arguments, name="convert"):
    call = {"function": {"name": name, "arguments": arguments}}
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize("arguments", [{"amount": 20}, '{"amount": 20.5, "to": "EUR"}'])
def test_calls_that_fit_are_accepted_as_are_all_calls_of_a_row_without_tools(arguments):
    refuse_wrong_calls(turns(arguments), [tool()])
    refuse_wrong_calls(turns("no JSON", "other"), None)


def test_arguments_beyond_the_named_ones_are_accepted_where_the_schema_says_so():
    refuse_wrong_calls(turns({"amount": 1, "x": 1}), [tool({**PARAMETERS, "additionalProperties": True})])
    refuse_wrong_calls(turns({"x": 1}), [tool({"type": "object"})])
    more = {"properties": {"x": {}}}
    refuse_wrong_calls(turns({"amount": 1, "x": 1}), [tool({**PARAMETERS, "allOf": [more]})])


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (turns({"amount": 1}, "lookup"), r"unknown tool lookup; known: convert\. Add its schema to `tools`"),
        (turns({"amount": "twenty"}), r"of convert: .* amount: 'twenty' is not of type 'number'\. Mend the call"),
        (turns({"to": "EUR"}), "'amount' is a required property"),
        (turns({"amount": 1, "unit": "EUR"}), "'unit' was unexpected"),
        (turns("{amount: 1}"), r"function\.arguments is a text that is not JSON"),
        (turns("[1]"), r"arguments: \[1\] is not of type 'object'"),
    ],
)
def test_a_call_that_its_tool_would_refuse_is_refused_with_its_place(messages, problem):
    with pytest.raises(ValueError, match=rf"^messages\[1\]\.tool_calls\[0\].*{problem}"):
        refuse_wrong_calls(messages, [tool()])


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"name": "convert", "parameters": PARAMETERS}, r"tools\[0\] must be \{\"type\": \"function\""),
        ({"type": "function", "function": {"parameters": PARAMETERS}}, r"tools\[0\]\.function\.name is missing"),
        (tool("number"), r"tools\[0\]\.function\.parameters must be a JSON schema"),
        (tool({"type": "numeral"}), "the parameters of convert are no JSON schema"),
    ],
)
def test_tools_of_another_form_are_refused_whether_they_are_called_or_not(wrong, problem):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(ValueError, match=problem):
        refuse_wrong_calls(messages, [wrong])
