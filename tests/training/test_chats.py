"""Chats: every format gives the same documents; every reply is trained as it is prompted for."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from selfspec import DEMO_MODEL
from training.data import SourceConfig, tokenize
from training.data.chats import BadRecord, chat_documents, frame, read_chat

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thoughts of earlier turns are left out (Qwen3).
FORGETFUL = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.last and '</think>' not in m.content %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{{ m.content if loop.index0 > ns.last else m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thoughts are left out of every turn.
THOUGHTLESS = CHATML.replace("m.content", "m.content.split('</think>')[-1].strip()")
# And the prompt opens the next one (R1, QwQ).
OPENING = THOUGHTLESS.replace("assistant\n'", "assistant\n<think>\n'")
CLOCK = "{{ strftime_now('%H:%M:%S.%f') }}\n" + CHATML
CHANCE = "{{ range(100000) | random }}\n" + CHATML  # as a clock that cannot be stopped
TEMPLATES = {
    "plain": CHATML,
    "forgetful": FORGETFUL,
    "thoughtless": THOUGHTLESS,
    "opening": OPENING,
    "clock": CLOCK,
    "clock and opening": CLOCK[: -len(CHATML)] + OPENING,
    "chance": CHANCE,
}


@pytest.fixture(scope="module")
def demo_tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture
def chatty(demo_tokenizer):
    demo_tokenizer.chat_template = CHATML
    return demo_tokenizer


within = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


NAN = float("nan")


def text_of(document, tokenizer, trained):
    """The text of the trained tokens, or of those before the first of them."""
    first = document.trained.index(True)
    tokens = zip(document.tokens, document.trained, strict=True)
    kept = [t for n, (t, learned) in enumerate(tokens) if (learned if trained else n < first)]
    return tokenizer.decode(kept)


def documents(record, tokenizer):
    return chat_documents(read_chat(record), tokenizer)


def turns(*texts):
    roles = ["user", "assistant"]
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


# Formats

HELLO = turns("Hi.", "Hello.", "And?", "So.")
SHAREGPT = [
    {"from": "human", "value": "Hi."},
    {"from": "gpt", "value": "Hello."},
    {"from": "user", "value": "And?"},
    {"from": "assistant", "value": "So."},
]
PARTS = [{**m, "content": [{"type": "text", "text": part} for part in m["content"]]} for m in HELLO]
FORMATS = {
    "openai": {"messages": HELLO},
    "as a string": {"messages": json.dumps(HELLO)},
    "specforge": {"id": "1", "conversations": HELLO},
    "sharegpt": {"id": "1", "conversations": SHAREGPT},
    "parts": {"messages": PARTS},
    "prompt of messages": {"prompt": HELLO[:3], "completion": HELLO[3:]},
    "other names of roles": {
        "messages": [{**m, "role": {"user": "Human", "assistant": "AI"}[m["role"]]} for m in HELLO]
    },
    "from with content": {
        "conversations": [{"from": m["role"], "content": m["content"]} for m in HELLO]
    },
    "role with value": {
        "conversations": [{"role": m["role"], "value": m["content"]} for m in HELLO]
    },
    "two messages a turn": {
        "conversation": [
            {"output": "Hello.", "input": "Hi."},
            {"human": "And?", "assistant": "So."},
        ]
    },
    "turns by role": {"conversation": [{m["role"]: m["content"], "system": None} for m in HELLO]},
    "columns": {"messages": {name: [m[name] for m in HELLO] for name in ("role", "content")}},
    "history": {"instruction": "And?", "output": "So.", "history": [["Hi.", "Hello."]]},
    "with null fields": {
        "messages": [{**m, "name": None, "tool_calls": None, "weight": None} for m in HELLO],
        "tools": None,
        "prompt": None,
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_a_chat_gives_the_same_documents(chatty, name):
    (document,) = documents(FORMATS[name], chatty)
    (expected,) = documents(FORMATS["openai"], chatty)
    if name == "prompt of messages":  # of which the prompt is trained, too
        assert document.tokens == expected.tokens
    assert document == expected


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi.", "completion": "Hello."},
        {"prompt": HELLO[:1], "completion": HELLO[1:2]},
        {"instruction": "Hi.", "output": "Hello."},
        {"instruction": "Hi.", "context": "", "response": "Hello."},
        {"question": "Hi.", "answer": "Hello."},
        {"query": "Hi.", "response": "Hello."},
        {"prompt": "Hi.", "response": "Hello.", "text": None},
        {"instruction": "Hi.", "input": "", "output": "Hello.", "history": None},
        {"messages": [], "prompt": "Hi.", "completion": "Hello."},
    ],
)
def test_a_question_and_its_answer_are_a_chat(chatty, record):
    record = {name: value for name, value in record.items() if value != []}
    assert documents(record, chatty) == documents({"messages": HELLO[:2]}, chatty)


def test_the_input_of_an_instruction_and_the_system_prompt_are_in_the_prompt(chatty):
    (document,) = documents({"instruction": "Sum.", "input": "1, 2", "output": "3"}, chatty)
    assert "user\nSum.\n\n1, 2<|im_end|>" in text_of(document, chatty, trained=False)
    (document,) = documents({"question": "Who?", "context": "Ann.", "answer": "She."}, chatty)
    assert "user\nWho?\n\nAnn.<|im_end|>" in text_of(document, chatty, trained=False)
    for key, said in (("messages", "system"), ("conversations", "system_prompt")):
        (document,) = documents({said: "Be brief.", key: HELLO[:2]}, chatty)
        start = text_of(document, chatty, trained=False)
        assert start.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_calls_of_sharegpt_are_calls_of_tools():
    call = {"name": "weather", "arguments": {"city": "Oslo"}}
    said = [("human", "Hi."), ("function_call", json.dumps(call)), ("observation", "Rain.")]
    chat = read_chat({"conversations": [{"from": who, "value": text} for who, text in said]})
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool"]
    assert chat.messages[1]["tool_calls"] == [{"type": "function", "function": call}]
    assert chat.messages[1]["content"] == ""


ARGUMENTS = {"city": "Óslo", "days": 2}
CALL = {"name": "weather", "arguments": ARGUMENTS}
CALL_AS_JSON = {**CALL, "arguments": json.dumps(ARGUMENTS)}  # as OpenAI has it


def test_the_call_of_a_message_before_there_were_tool_calls():
    asked = {"role": "assistant", "content": None, "function_call": CALL_AS_JSON}
    chat = read_chat({"messages": [{"role": "user", "content": "Hi."}, asked]})
    assert chat.messages[1]["tool_calls"] == [{"type": "function", "function": CALL}]


def test_functions_and_their_results_before_there_were_tools():
    result = {"role": "function", "name": "weather", "content": "Rain."}
    chat = read_chat({"messages": [*turns("Hi."), result], "functions": [{"name": "weather"}]})
    assert chat.messages[1]["role"] == "tool"
    assert chat.options["tools"] == [{"type": "function", "function": {"name": "weather"}}]


def test_tools_may_be_strings_of_json():
    tool = {"type": "function", "function": {"name": "weather"}}
    for tools in (json.dumps([tool]), [json.dumps(tool)]):
        assert read_chat({"messages": turns("Hi."), "tools": tools}).options["tools"] == [tool]


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Hi.", "answer": "Hello.", "context": NAN},
        {"instruction": "Hi.", "input": NAN, "output": "Hello.", "system": NAN},
        {"messages": [{**turn, "weight": NAN} for turn in turns("Hi.", "Hello.")]},
    ],
)
def test_nan_is_null(chatty, record):
    assert documents(record, chatty) == documents({"messages": turns("Hi.", "Hello.")}, chatty)


def test_a_number_is_an_answer(chatty):
    wanted = documents({"question": "2 + 2", "answer": "4"}, chatty)
    assert documents({"question": "2 + 2", "answer": 4}, chatty) == wanted


IN_PARTS = CHATML.replace(
    "m.content + ",
    "(m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join) + ",
)
IN_LOOPS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [IN_PARTS, IN_LOOPS], ids=["fails", "shows nothing"])
def test_a_template_that_takes_parts_gets_them(chatty, template):
    wanted = documents({"messages": HELLO}, chatty)
    chatty.chat_template = template
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in HELLO]
    assert documents({"messages": HELLO}, chatty) == wanted
    assert documents({"messages": parts}, chatty) == wanted


def test_calls_that_a_template_leaves_out_are_not_trained_as_nothing(chatty):
    reply = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    with pytest.raises(BadRecord, match="leaves out the `tool_calls`"):
        documents({"messages": [*turns("Hi."), reply]}, chatty)
    (document,) = documents({"messages": [*HELLO[:2], HELLO[0], reply]}, chatty)
    assert text_of(document, chatty, trained=True) == "Hello.<|im_end|>\n"


def test_a_tokenizer_without_offsets_is_named(chatty, monkeypatch):
    monkeypatch.setattr(type(chatty), "is_fast", False)
    with pytest.raises(ValueError, match=r"is a tokenizer in Python, .* tokenizer\.json"):
        documents({"messages": HELLO}, chatty)


@pytest.mark.parametrize(
    "calls",
    [
        [{"type": "function", "function": CALL}],
        [{"type": "function", "function": CALL_AS_JSON}],
        [CALL_AS_JSON],
        json.dumps([{"function": CALL_AS_JSON}]),
    ],
)
@pytest.mark.parametrize("shown", ["(c.function or c).arguments | tojson", "'' + {}"])
def test_a_template_gets_the_arguments_of_calls_as_it_takes_them(chatty, calls, shown):
    shown = shown.format("(c.function or c).arguments")  # text is all that the second can add
    calling = "{% for c in m.tool_calls or [] %}{{ " + shown + " }}{% endfor %}"
    chatty.chat_template = CHATML.replace(" + '<|im_end|>", "}}" + calling + "{{'<|im_end|>")
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    (document,) = documents({"messages": [HELLO[0], turn, *HELLO[2:]]}, chatty)
    text = chatty.decode(document.tokens)
    assert json.loads(text[text.index("{") : text.index("}") + 1]) == ARGUMENTS


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": [*turns("Hi."), {"role": "assistant"}]}, "the assistant has no `content`"),
        ({"messages": [{"role": None, "content": "Hi."}]}, "a `role` and a `content`"),
        ({"messages": [{"role": "user", "content": 7}]}, "not text, but 'int'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "but 'image_url'"),
        ({"conversations": [{"from": "someone", "value": "Hi."}]}, "from` 'someone'"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "JSON with a `name`"),
        ({"messages": [{"role": "", "content": "Hi."}]}, "a `role` and a `content`"),
        ({"messages": HELLO, "system": ["Be brief."]}, "`system` of a chat is text"),
        ({"prompt": {"text": "Hi."}, "completion": "Ho."}, "`prompt` of a chat is text"),
        ({"instruction": "Sum.", "input": [1, 2], "output": "3"}, "`input` of a chat is text"),
        ({"messages": HELLO, "tools": "none"}, "`tools` of a chat is a list"),
        ({"messages": [{**HELLO[1], "tool_calls": "f()"}]}, "`tool_calls` of a turn is a list"),
        ({"messages": HELLO, "chat_template_kwargs": [1]}, "is a dict"),
        ({"messages": [{**HELLO[0]}, {**HELLO[1], "weight": 0.5}]}, "`weight` of a turn is 0 or 1"),
        ({"messages": [{**HELLO[0]}, {**HELLO[1], "train": "no"}]}, "`train` of a turn is 0 or 1"),
        ({"prompt": "Hi.", "completion": "Ho.", "history": ["Hi."]}, "`history` is a list of"),
        ({"messages": [{"user": "Hi.", "id": 7}]}, "a `role` and a `content`"),
        ({"messages": {"messages": HELLO}}, "a list `messages`"),
        ({"messages": None}, r"got fields \['messages'\]"),
        ({"question": "Hi."}, r"got fields \['question'\]; `conversations`, `prompt`"),
        ({"messages": HELLO, "images": ["a.png"]}, "a chat with `images` is not read"),
        ({"chosen": HELLO, "rejected": HELLO}, "two answers; to train on `chosen`, name it"),
        ({"prompt": "Hi.", "chosen": "Ho.", "rejected": "No."}, "`completion` if it answers"),
    ],
)
def test_what_is_no_chat_is_a_bad_record(chatty, record, reason):
    with pytest.raises(BadRecord, match=reason):
        documents(record, chatty)


def test_what_a_template_cannot_render_is_a_bad_record(chatty):
    chatty.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadRecord, match=r"the chat template fails on it .*roles must alternate"):
        documents({"messages": HELLO}, chatty)


@within
@given(
    data=st.data(),
    fields=st.lists(
        st.sampled_from(["name", "tool_calls", "weight", "reasoning_content", "refusal"]),
        unique=True,
    ),
)
def test_null_is_never_a_word(chatty, data, fields):
    shown = "".join(f" ~ (m.{field} if m.{field} is defined else '')" for field in fields)
    chatty.chat_template = CHATML.replace("m.content", f"m.content{shown}")
    some = st.sets(st.sampled_from(fields)) if fields else st.just(set())
    messages = [{**message, **dict.fromkeys(data.draw(some))} for message in HELLO]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    record = {"messages": [*messages, HELLO[0], call], "tools": None, "documents": None}
    for document in documents(record, chatty):
        assert "None" not in chatty.decode(document.tokens)


# Fields beside the messages


@pytest.mark.parametrize("as_string", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "get_weather"}}]),
        ("documents", [{"title": "get_weather", "text": "It rains."}]),
        ("chat_template_kwargs", {"enable_thinking": "get_weather"}),
    ],
)
def test_what_a_template_reads_beside_the_messages_reaches_it(chatty, name, value, as_string):
    chatty.chat_template = (
        "{{ [tools, documents, enable_thinking | default(none)] | tojson }}" + CHATML
    )
    given = json.dumps(value) if as_string else value
    (document,) = documents({"messages": HELLO, name: given}, chatty)
    told = value if name == "chat_template_kwargs" else {name: value}
    whole = chatty.apply_chat_template(HELLO, tokenize=False, **told)
    assert chatty.decode(document.tokens) == whole and "get_weather" in whole
    assert text_of(document, chatty, trained=True) == "Hello.<|im_end|>\nSo.<|im_end|>\n"


@pytest.mark.parametrize("off", [{"weight": 0}, {"train": "False"}, {"weight": 0.0, "train": True}])
def test_a_turn_without_weight_is_not_trained(chatty, off):
    messages = [*HELLO[:1], {**HELLO[1], **off}, *HELLO[2:]]
    (document,) = documents({"messages": messages}, chatty)
    assert text_of(document, chatty, trained=True) == "So.<|im_end|>\n"
    assert documents({"messages": messages[:2]}, chatty) == []
    assert documents({"messages": messages[:2], "images": [], "label": True}, chatty) == []
    on = [{**m, "weight": 1, "train": True} for m in HELLO]
    assert documents({"messages": on}, chatty) == documents({"messages": HELLO}, chatty)


def test_an_answer_labelled_bad_is_not_trained(chatty):
    pair = {"prompt": "Hi.", "completion": "Hello."}
    assert documents({**pair, "label": False}, chatty) == []
    assert documents({**pair, "label": True}, chatty) == documents(pair, chatty) != []
    (document,) = documents({"messages": HELLO, "label": False}, chatty)
    assert text_of(document, chatty, trained=True) == "Hello.<|im_end|>\n"


@pytest.mark.parametrize(
    ("record", "template"),
    [
        ({"text": "Hi.", "messages": None}, "{text}"),
        ({"text": "Hi.", "question": "Hi.", "answer": "Ho."}, "{text}"),
        ({"prompt": "Hi.", "completion": "Ho."}, "{prompt} {completion}"),
    ],
)
def test_a_text_or_a_template_for_one_makes_no_chat(tmp_path, chatty, record, template):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(record))
    (document,) = tokenize(SourceConfig(files=[str(file)], template=template), chatty)
    text = chatty.decode(document.tokens, skip_special_tokens=True)
    assert all(document.trained) and text == template.format(**record)


def test_a_greeting_answers_nothing(chatty):
    (document,) = documents({"messages": [HELLO[1], *HELLO[2:]]}, chatty)
    assert text_of(document, chatty, trained=True) == "So.<|im_end|>\n"


# Templates of reasoning models

words = st.sampled_from(["Yes.", "It is 4.", "No, <b>three</b>.", "a\n\nb"])
thoughts = st.sampled_from(["", "<think>\nEasy.\n</think>\n\n", "<think>Hm.</think>"])


@within
@given(
    template=st.sampled_from(sorted(TEMPLATES)),
    replies=st.lists(st.tuples(thoughts, words), min_size=1, max_size=3),
)
def test_every_reply_is_trained_behind_the_prompt_that_asks_for_it(chatty, template, replies):
    chatty.chat_template = TEMPLATES[template]
    contents = [thought + said for thought, said in replies]
    messages = turns(*(text for n, c in enumerate(contents) for text in (f"Question {n}?", c)))
    found = documents({"messages": messages}, chatty)
    learned = "".join(text_of(document, chatty, trained=True) for document in found)
    assert "Question" not in learned and "<|im_start|>" not in learned
    assert learned.count("<|im_end|>") == len(replies)
    for content in contents:  # whole, up to what the prompt has opened of it
        opened = "<think>" if "opening" in template else ""
        assert content.removeprefix(opened).strip() in learned
    if len(found) == len(replies) and template != "chance":
        for n, document in enumerate(found):
            prompt = read_chat({"messages": messages[: 2 * n + 1]}).render(chatty, reply_next=True)
            assert text_of(document, chatty, trained=False) == prompt


def test_a_template_that_keeps_its_turns_gives_one_document(chatty):
    for template in (CHATML, CLOCK):
        chatty.chat_template = template
        assert len(documents({"messages": HELLO}, chatty)) == 1


def test_a_thought_in_a_field_of_its_own_follows_the_prompt_that_opens_it(chatty):
    chatty.chat_template = OPENING
    reply = {"role": "assistant", "content": "It is 4.", "reasoning_content": "Easy."}
    (document,) = documents({"messages": [*HELLO[:1], reply]}, chatty)
    assert text_of(document, chatty, trained=False).endswith("assistant\n<think>\n")
    assert text_of(document, chatty, trained=True) == "Easy.\n</think>\n\nIt is 4.<|im_end|>\n"


def test_no_model_writes_behind_the_token_that_ends_its_turn(chatty):
    chatty.chat_template = OPENING.replace("<|im_end|>", chatty.eos_token)
    (document,) = documents({"messages": HELLO[:2]}, chatty)
    assert document.tokens[-1] == chatty.eos_token_id and document.trained[-1]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_frame_is_what_the_prompt_opens_and_what_ends_a_turn(chatty, template):
    chatty.chat_template = TEMPLATES[template]
    chat = read_chat({"messages": HELLO[:1]})
    opened, end = frame(chat, chatty, chat.render(chatty, reply_next=True))
    assert opened == ("<think>\n" if "opening" in template else "")
    assert end == "<|im_end|>\n"


def test_time_stands_still_in_chats(tmp_path, chatty):
    chatty.chat_template = CLOCK
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": HELLO}) + "\n")
    first, again = (list(tokenize(SourceConfig(files=[str(path)]), chatty)) for _ in range(2))
    assert first == again
