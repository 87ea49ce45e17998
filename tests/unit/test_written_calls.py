"""Tool calls that a language model writes into its text."""

import pytest

from quantdrift.models.language.answer import ToolCall
from quantdrift.models.language.written_calls import WrittenCalls, has_written_call, written_calls

pytestmark = pytest.mark.unit

HERMES, MISTRAL, LLAMA = "... <tool_call>\\n ...", "[TOOL_CALLS]", '{"name": "x", "parameters": {}}'
BONN = ToolCall(name="weather", arguments='{"city":"Bonn"}')
ULM = ToolCall(name="weather", arguments='{"city":"Ulm"}')


@pytest.mark.parametrize(
    ("text", "template", "found"),
    [
        (
            'Let me look.<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
            HERMES,
            WrittenCalls(text="Let me look.", calls=(BONN,)),
        ),
        (
            (
                '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>\n'
                '<tool_call>{"name": "weather", "arguments": "{\\"city\\":\\"Ulm\\"}"}</tool_call>'
            ),
            HERMES,
            WrittenCalls(text="", calls=(BONN, ULM)),
        ),
        ("It rains.", HERMES, WrittenCalls(text="It rains.")),
        ("<tool_call>\n<function=weather>\n</function></tool_call>", HERMES, None),
        ('<tool_call>{"name": "weather", "arg', HERMES, None),
        (
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bonn"}}]',
            MISTRAL,
            WrittenCalls(text="", calls=(BONN,)),
        ),
        ("[TOOL_CALLS]weather[ARGS]{}", MISTRAL, None),
        (
            '<|python_tag|>{"name": "weather", "parameters": {"city": "Bonn"}}',
            LLAMA,
            WrittenCalls(text="", calls=(BONN,)),
        ),
        ("<|python_tag|>weather.call(city=1)", LLAMA, None),
        ('{"name": "Ada"}', LLAMA, WrittenCalls(text='{"name": "Ada"}')),
        ("It rains.", "{{ messages }}", None),
    ],
)
def test_calls_are_read_in_the_form_of_the_template(
    text: str, template: str, found: WrittenCalls | None
) -> None:
    """What cannot be read, and what a template of another form writes, is not known: it is not that nothing is called."""
    assert written_calls(text, template) == found


def test_a_call_that_a_server_left_in_the_text_is_seen() -> None:
    """Then it is not known what the server would have made of it."""
    assert has_written_call('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert has_written_call('{"name": "f", "parameters": {}}')
    assert not has_written_call('{"name": "Ada"}')
    assert not has_written_call("It rains.")
