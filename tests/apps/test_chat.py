"""A conversation: what the model would reply to the whole text, and only new tokens are run."""

import pytest
import torch
from cli_tools import PROMPT
from conftest import EXIT, VOCAB, greedy, tiny_llama
from families import build
from transformers.generation.streamers import BaseStreamer

from selfspec import DraftConfig, SelfSpecModel
from selfspec.apps.cli.conversation import Conversation

DRAFT = DraftConfig(exit_layer=EXIT, num_draft_tokens=3)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
SAID = ["the cat", "on the mat", "in the sun"]


@pytest.fixture
def converse(tokenizer):
    """Begins a conversation with a tiny target."""

    def begin(template=None, model=None, **options):
        tokenizer.chat_template = template
        spec = SelfSpecModel(model or tiny_llama("sometimes"))
        given = {"max_new_tokens": 8, "do_sample": False, **options.pop("options", {})}
        return Conversation(spec, tokenizer, DRAFT, given, **options)

    return begin


def own_reply(talk, ids, count=8):
    """What the target's own `generate` replies to a text."""
    text = torch.tensor([ids])
    return greedy(talk.spec.model, text, max_new_tokens=count)[0].tolist()


def test_without_a_template_the_text_goes_on(converse):
    talk = converse()
    encode = talk.tokenizer.encode
    text = encode(SAID[0])
    for place, said in enumerate(SAID):
        if place:
            text = text + encode(f"\n{said}")
        turn = talk.say(said)
        assert turn.prompt_tokens == len(text)
        text = own_reply(talk, text)
        assert talk.tokens == text
        assert turn.text == talk.tokenizer.decode(text[turn.prompt_tokens :])


def test_behind_the_end_of_a_text_there_is_no_new_line(converse):
    model = tiny_llama("sometimes")
    talk = converse(model=model)
    written = own_reply(talk, talk.tokenizer.encode(SAID[0]))
    end = written[-5]
    model.generation_config.eos_token_id = end
    talk.say(SAID[0])
    before = list(talk.tokens)
    assert before[-1] == end
    turn = talk.say(SAID[1])
    assert talk.tokens[: turn.prompt_tokens] == before + talk.tokenizer.encode(SAID[1])


@pytest.mark.parametrize("system", [None, "a man"])
def test_with_a_template_turns_are_messages(converse, system):
    talk = converse(TEMPLATE, system=system)
    messages = [] if system is None else [{"role": "system", "content": system}]
    for said in SAID:
        messages.append({"role": "user", "content": said})
        ids = talk.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        turn = talk.say(said)
        assert talk.tokens == own_reply(talk, ids)
        messages.append({"role": "assistant", "content": turn.text})


def test_a_template_that_reads_contents_in_parts_gets_them_so(converse):
    """As those of image models do: it would show nothing of a string."""
    shown = "{{ m.content | map(attribute='text') | join }}"
    parts = TEMPLATE.replace("{{ m.content | trim }}", shown)
    assert parts != TEMPLATE
    plain = converse(TEMPLATE, system="a man")
    texts = [plain.say(said).text for said in SAID[:2]]
    talk = converse(parts, system="a man")
    assert [talk.say(said).text for said in SAID[:2]] == texts and talk.tokens == plain.tokens


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "template"])
def test_only_new_tokens_are_run(converse, watch, template):
    talk = converse(template)
    watch(talk.spec)  # checks that prefill runs what the cache does not hold, and nothing else
    before = []
    for said in SAID:
        turn = talk.say(said)
        text = talk.tokens[: turn.prompt_tokens]
        pairs = zip(before[:-1], text, strict=False)  # the last token has no KV yet
        same = [old == new for old, new in pairs]
        assert turn.cached_tokens == [*same, False].index(False)
        before = list(talk.tokens)
    assert turn.cached_tokens > 0


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_template_that_writes_replies_in_its_own_way_is_read_as_it_stands(converse, family):
    """KV of what the template leaves out is not used; recurrent states begin anew."""
    short = TEMPLATE.replace("m.content | trim", "m.content[:3] | trim")
    model = build(family, "sdpa")
    model.resize_token_embeddings(VOCAB, mean_resizing=False)
    talk = converse(short, model)
    for said in SAID:
        turn = talk.say(said)
        ids = talk.tokens[: turn.prompt_tokens]
        assert talk.tokens == own_reply(talk, ids)
    assert turn.cached_tokens < turn.prompt_tokens - 1


def test_a_reset_conversation_is_a_new_one(converse):
    talk, fresh = converse(TEMPLATE, system="a man"), converse(TEMPLATE, system="a man")
    talk.say(SAID[0])
    talk.reset()
    again, first = talk.say(SAID[1]), fresh.say(SAID[1])
    assert (again.text, again.cached_tokens) == (first.text, 0)
    assert talk.tokens == fresh.tokens


def test_a_reply_can_be_stopped_and_the_conversation_goes_on(converse):
    talk = converse(options={"max_new_tokens": 20})
    whole = own_reply(talk, talk.tokenizer.encode(SAID[0]), 20)

    class Listener(BaseStreamer):
        heard = 0

        def put(self, value):
            Listener.heard += len(value) if value.ndim == 1 else 0  # the prompt has two

        def end(self):
            pass

    turn = talk.say(SAID[0], Listener(), stop=lambda: Listener.heard >= 5)
    assert turn.stopped
    assert 5 <= len(talk.tokens) - turn.prompt_tokens < 20
    assert talk.tokens == whole[: len(talk.tokens)]
    after = talk.say(SAID[1])
    assert not after.stopped
    assert after.cached_tokens == turn.prompt_tokens + turn.stats.emitted - 1
    assert talk.tokens == own_reply(talk, talk.tokens[: after.prompt_tokens], 20)


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "template"])
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_turn_that_fails_leaves_the_conversation_as_it_was(converse, template, when):
    talk, fresh = converse(template), converse(template)
    if when == "later":
        talk.say(SAID[0])
        fresh.say(SAID[0])

    def fail():
        raise KeyboardInterrupt

    tokens, messages = list(talk.tokens), list(talk.messages)
    with pytest.raises(KeyboardInterrupt):
        talk.say(SAID[2], stop=fail)
    assert (talk.tokens, talk.messages) == (tokens, messages)
    assert talk.say(SAID[1]).text == fresh.say(SAID[1]).text
    assert talk.tokens == fresh.tokens


def test_a_reply_ends_at_the_last_position_and_no_turn_begins_behind_it(converse):
    model = tiny_llama("sometimes", max_position_embeddings=24)
    talk = converse(model=model, options={"max_new_tokens": 20})
    turn = talk.say(PROMPT)
    assert len(talk.tokens) == 24
    tokens = list(talk.tokens)
    with pytest.raises(ValueError, match=r"would have \d+ tokens, the model 24 positions; reset"):
        talk.say(SAID[1])
    assert talk.tokens == tokens
    talk.reset()
    assert talk.say(PROMPT).text == turn.text


def test_a_seed_repeats_a_sampled_conversation(converse):
    def texts(seed):
        talk = converse(options={"do_sample": True, "temperature": 1.5}, seed=seed)
        return [talk.say(said).text for said in SAID]

    assert texts(1) == texts(1) != texts(2)


def test_what_cannot_be_said(converse):
    with pytest.raises(ValueError, match="an empty turn"):
        converse().say("  ")
    with pytest.raises(ValueError, match="needs a chat template"):
        converse(system="a man")
