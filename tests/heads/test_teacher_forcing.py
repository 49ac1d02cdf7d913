"""Teacher forcing: documents keep to themselves, at every step of an unrolled head."""

import pytest
import torch
from conftest import EXIT, prompt, tiny_llama
from families import LAYERS, build
from head_tools import PARALLEL, UNROLLED, WITH_LAYER, own_head

from selfspec.decoder import Decoder, Packing
from selfspec.heads import draft_states, target_states

STEPS = 3
LENGTHS = (5, 2, 9, 1, 4)
TOKENS = prompt(sum(LENGTHS), seed=5, vocab=60)[0]
# The number of a document may come again; it is another document all the same.
DOCUMENTS = torch.cat([torch.full((n,), i % 3) for i, n in enumerate(LENGTHS)])[None]
FAMILIES = ["llama", "gpt2", "gemma3_text", "gpt_neo", "gemma2", "mistral"]


def spans():
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]


@pytest.fixture(params=FAMILIES)
def decoder(request):
    attention = "eager" if request.param in ("gemma2", "gpt_neo") else "sdpa"
    return Decoder(build(request.param, attention).double())


def read(decoder, head, tokens, documents=None):
    reading = target_states(decoder, tokens, documents, head.input_layers)
    return reading, list(draft_states(decoder, head, reading, STEPS))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", WITH_LAYER)
@torch.no_grad()
def test_a_document_in_a_block_is_read_as_alone(decoder, kind):
    head = own_head(decoder, kind, LAYERS // 2, noise=0.2)
    packed, states = read(decoder, head, TOKENS, DOCUMENTS)
    assert len(states) == (STEPS if kind in (*UNROLLED, *PARALLEL) else 1)
    for span in spans():
        alone, own = read(decoder, head, TOKENS[:, span])
        close(packed.normed[:, span], alone.normed)
        for layer in head.input_layers:
            close(packed.streams[layer][:, span], alone.streams[layer])
        for step, (state, expected) in enumerate(zip(states, own, strict=True)):
            known = step + head.skips_first
            close(state[:, span][:, known:], expected[:, known:])


def close(actual, expected):
    # Some families take their softmax in float32 whatever the dtype.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", WITH_LAYER)
def test_no_gradient_goes_from_one_document_to_another(kind):
    decoder = Decoder(tiny_llama("sometimes"))
    head = own_head(decoder, kind, EXIT)
    reading = target_states(decoder, TOKENS, DOCUMENTS, head.input_layers)
    streams = [stream.requires_grad_() for stream in reading.streams.values()]
    for step, state in enumerate(draft_states(decoder, head, reading, STEPS)):
        weights = torch.randn(state.shape[1:], dtype=torch.float64)
        for span in spans():
            known = step + head.skips_first
            there = (state * weights)[:, span][:, known:].sum()
            if span.stop - span.start <= known:
                continue
            gradients = torch.autograd.grad(there, streams, retain_graph=True, allow_unused=True)
            reached = sum(g.abs().sum(-1)[0] for g in gradients if g is not None)
            assert bool((reached[span] > 0).any())
            reached[span] = 0
            assert not reached.any()


def test_every_step_teaches_the_layer():
    decoder = Decoder(tiny_llama("sometimes"))
    head = own_head(decoder, "fused", EXIT).requires_grad_(True)
    reading = target_states(decoder, TOKENS, DOCUMENTS, head.input_layers)
    for state in draft_states(decoder, head, reading, STEPS):
        gradients = torch.autograd.grad(
            head.logits(decoder, state)[:, 2:5].square().sum(), head.parameters(), retain_graph=True
        )
        assert all(bool(gradient.any()) for gradient in gradients)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_mask_shows_what_decoding_would(window, step):
    packing = Packing.of(DOCUMENTS)
    mask = packing.mask(window, torch.float64, step)[0, 0]
    width, document = TOKENS.shape[1], packing.documents[0]
    for query in range(width):
        # Drafted tokens are seen in the reading that drafted them, others in the first.
        last = query - step
        seen = {(0, key) for key in range(last + 1)}
        seen |= {(reading, last + reading) for reading in range(1, step + 1)}
        seen = {(r, key) for r, key in seen if document[key] == document[query] and key >= 0}
        if window is not None:
            seen = {(r, key) for r, key in seen if query - key < window}
        shown = (mask[query] == 0).nonzero()[:, 0].tolist()
        if packing.positions[0, query] < step:
            assert shown == [step * width + query]
        else:
            assert {(place // width, place % width) for place in shown} == seen


def test_positions_begin_anew_in_each_document():
    packing = Packing.of(DOCUMENTS)
    assert packing.positions[0].tolist() == [i for n in LENGTHS for i in range(n)]
    assert not packing.whole
    assert Packing.of(DOCUMENTS, whole=True).positions[0].tolist() == list(range(sum(LENGTHS)))


def test_more_than_one_step_is_refused_where_keys_are_counted():
    decoder = Decoder(build("bloom", "eager"))
    head = own_head(decoder, "fused", LAYERS // 2)
    reading = target_states(decoder, TOKENS, DOCUMENTS, head.input_layers)
    assert len(list(draft_states(decoder, head, reading, 1))) == 1
    with pytest.raises(ValueError, match=r"BloomForCausalLM biases attention.*one step"):
        next(draft_states(decoder, head, reading, 2))
