"""The toy models' tokenizer: byte-level BPE, trained when it is built, with a chat template in the Qwen style.

It encodes any UTF-8 text. Each digit is a token, and so is each word of arithmetic and tool calls; a conversation with
a tool call has fewer than 200 tokens.
"""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InSequence
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

MAX_VOCABULARY = 640
"""Upper bound; training stops earlier when every frequent word is a token."""

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

PRE_TOKENS = r"[\d()]| ?[^\s\d()\\]+|\\[^\s\d()\\]+|\s"
"""BPE merges within these only: single digits and parentheses, words with the space before them, white space."""

MAX_VOCABULARY_WITH_TEXT = 1280
WORDS = r"[\d()]| ?\p{L}+|\\\p{L}+| ?[^\s\p{L}\d()\\]+|\s|\\"
"""The same where a task brings its text, but for words without the punctuation around them: a name is one token."""

CHAT_TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\nFor each call:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {{- message.content or '' }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}
                {{- '\n' }}
            {%- endif %}
            {%- set call = tool_call.function if tool_call.function else tool_call %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

_CORPUS = (
    "system user assistant tool",
    "# Tools",
    "<tools>",
    '{"type": "function", "function": {"name": "calculator", "description": "Evaluate arithmetic.", '
    '"parameters": {"type": "object", "properties": {"expression": {"type": "string", "description": "Arithmetic."}}, '
    '"required": ["expression"]}}}',
    "</tools>",
    "For each call:",
    '{"name": <name>, "arguments": <object>}',
    '{"name": "calculator", "arguments": {"expression": "1+2*3-4/5"}}',
    '{"name": "calculator", "arguments": {"expression": "1"} "(1)*(2)+(3)-(4)/5)"}}',
    r"Put the answer in \boxed{}. The answer is \boxed{1}. 1+2 = \boxed{3}.",
    "Compute Evaluate Calculate Work out Find Solve What is the value of exactly Please Tell me roughly about",
    "1 plus 2 times 3 minus 4 divided by 5. What is 1 plus 2? And then: So it is 6. That",
    "error: malformed tool call: it cannot be read not closed; unknown tool calculator; known: none",
    "invalid expression division by zero",
)
"""Training text: these lines, and each of their words."""


def build_tokenizer(text: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Train the tokenizer; the same on every call.

    Args:
        text: of a task, whose words become tokens too.

    Returns:
        A tokenizer of at most MAX_VOCABULARY entries with `chat_template`, end of turn as eos and end of text as pad.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = InSequence(
        [Split(Regex(WORDS if text else PRE_TOKENS), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=MAX_VOCABULARY_WITH_TEXT if text else MAX_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [word for line in _CORPUS for word in line.split() if word.isalpha()]
    tokenizer.train_from_iterator([*_CORPUS, *words, *text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE.strip(),
        clean_up_tokenization_spaces=False,
        additional_special_tokens=["<|im_start|>"],
    )
