"""Streamers of transformers show the same text, and several rows in the same steps."""

import asyncio
import threading

import pytest
import torch
from conftest import EXIT, greedy, prompt, tiny_llama
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from selfspec import DraftConfig, SelfSpecModel

DRAFT = DraftConfig(exit_layer=EXIT, num_draft_tokens=5)
TARGETS = {name: tiny_llama(name) for name in ("always", "sometimes")}
IDS, MASK = prompt(5)
targets = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


def stream(target, streamer, ids=IDS, mask=MASK, **options):
    """Our text, shown to a streamer on the way."""
    return SelfSpecModel(target).generate(
        ids,
        attention_mask=mask,
        max_new_tokens=20,
        draft=DRAFT,
        streamer=streamer,
        do_sample=False,
        **options,
    )


class Columns(BaseStreamer):
    """Keeps every put."""

    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        assert not self.ended and value.device.type == "cpu"
        self.puts.append(value.tolist())

    def end(self):
        self.ended += 1


@targets
@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_text_streamer_prints_the_text(target, skip_prompt, tokenizer, capsys):
    greedy(target, IDS, MASK, max_new_tokens=20, streamer=TextStreamer(tokenizer, skip_prompt))
    plain = capsys.readouterr().out
    text = stream(target, TextStreamer(tokenizer, skip_prompt))
    assert capsys.readouterr().out == plain
    assert plain == tokenizer.decode(text[0, 5 if skip_prompt else 0 :]) + "\n"


@targets
def test_an_iterator_streamer_in_a_thread(target, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    worker = threading.Thread(target=stream, args=(target, streamer))
    worker.start()
    pieces = list(streamer)
    worker.join(30)
    own = greedy(target, IDS, MASK, max_new_tokens=20)
    assert "".join(pieces) == tokenizer.decode(own[0, 5:])


@targets
def test_an_async_iterator_streamer(target, tokenizer):
    async def read():
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
        worker = asyncio.create_task(asyncio.to_thread(stream, target, streamer))
        pieces = [piece async for piece in streamer]
        await worker
        return "".join(pieces)

    own = greedy(target, IDS, MASK, max_new_tokens=20)
    assert asyncio.run(read()) == tokenizer.decode(own[0, 5:])


@targets
def test_one_row_is_shown_round_by_round_as_soon_as_it_is_settled(target):
    columns, spec = Columns(), SelfSpecModel(target)
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=20, draft=DRAFT, streamer=columns)
    rounds = [list(step.tokens) for step in spec.last_trace.rows[0]]
    assert columns.puts == [IDS.tolist(), *rounds]
    assert columns.ended == 1


@pytest.mark.matrix(share=1)
@targets
@pytest.mark.parametrize("lengths", [(4, 2, 7), (5, 5)], ids=str)
@pytest.mark.parametrize("eos", [False, True], ids=["full length", "rows end apart"])
def test_several_rows_are_shown_in_the_steps_of_plain_decoding(target, lengths, eos):
    ids, mask = prompt(*lengths)
    text = greedy(target, ids, mask, max_new_tokens=20)[:, max(lengths) :]
    options = {"eos_token_id": [int(text[0, 3]), int(text[-1, 11])]} if eos else {}
    plain, ours = Columns(), Columns()
    greedy(target, ids, mask, max_new_tokens=20, streamer=plain, **options)
    stream(target, ours, ids, mask, **options)
    assert ours.puts == plain.puts
    assert ours.ended == plain.ended == 1


def test_a_row_that_was_padded_on_the_right_shows_the_same_steps():
    ids, mask = prompt(3, 7)
    right, right_mask = ids.clone(), mask.clone()
    right[0], right_mask[0] = ids[0].roll(-4), mask[0].roll(-4)
    plain, ours = Columns(), Columns()
    greedy(TARGETS["sometimes"], ids, mask, max_new_tokens=20, streamer=plain)
    stream(TARGETS["sometimes"], ours, right, right_mask)
    assert ours.puts[1:] == plain.puts[1:]


def test_streaming_while_sampling_shows_what_is_returned():
    columns = Columns()
    text = SelfSpecModel(TARGETS["sometimes"]).generate(
        IDS,
        attention_mask=MASK,
        do_sample=True,
        max_new_tokens=20,
        draft=DRAFT,
        streamer=columns,
        generator=torch.Generator().manual_seed(0),
    )
    assert [token for put in columns.puts[1:] for token in put] == text[0, 5:].tolist()
