"""Every position of a block is processed with the prefix that plain decoding would show it."""

import pytest
import torch
from conftest import BIASES_IN_BLOCKS
from scipy.stats import chisquare
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from selfspec.sampling.context import Context
from selfspec.sampling.draft import Tree
from selfspec.sampling.processors import BY_VALUE
from selfspec.sampling.sampler import Sampler, draw
from selfspec.sampling.vocabulary import DraftVocabulary

VOCAB = 11
LENGTHS = [6, 4, 7]


def text(seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (3, max(LENGTHS)), generator=source)


def context(rows=(0, 1, 2)):
    """Three rows of different lengths, some of which have ended."""
    tokens = text() * (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None])
    return Context(tokens, list(LENGTHS), list(rows))


def block(rows, width, seed=5):
    source = torch.Generator().manual_seed(seed)
    drafts = torch.randint(0, VOCAB, (rows, width - 1), generator=source)
    return drafts, torch.randn(rows, width, VOCAB, generator=source)


def plain(processors, context, drafts, logits):
    """Position by position and row by row, as plain decoding calls the processors."""
    expected = torch.empty_like(logits)
    for place, row in enumerate(context.rows):
        settled = context.tokens[row, : context.lengths[row]]
        for position in range(logits.shape[1]):
            prefix = torch.cat([settled, drafts[place, :position]])
            # Rows stand at their own index, as processors may know them by it.
            every = prefix.expand(len(context.lengths), -1)
            scores = logits[place, position].expand(len(context.lengths), -1).clone()
            expected[place, position] = processors(every, scores)[row]
    return expected


def ignoring(*padding):
    """A penalty that ignores the padding of each row; before transformers 5.23, of all as much."""
    try:
        return hf.RepetitionPenaltyLogitsProcessor(1.7, torch.tensor(padding))
    except ValueError:
        return hf.RepetitionPenaltyLogitsProcessor(1.7, max(padding))


PREFIX = {
    "repetition": [hf.RepetitionPenaltyLogitsProcessor(1.7)],
    "no repeat": [hf.NoRepeatNGramLogitsProcessor(2)],
    "min length": [hf.MinLengthLogitsProcessor(8, [3, 4])],
    "min new": [hf.MinNewTokensLengthLogitsProcessor(4, 4, [3])],
    "bad words": [hf.NoBadWordsLogitsProcessor([[3], [5, 2], [1, 4, 6]])],
    "no repeat, long": [hf.NoRepeatNGramLogitsProcessor(5)],
    "no repeat, single": [hf.NoRepeatNGramLogitsProcessor(1)],
    "repetition behind": [hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=3)],
    "all in blocks": [
        hf.SequenceBiasLogitsProcessor({(9,): -2.0, (5, 2): 1.5, (1, 4, 6): 3.0}),
        ignoring(2, 0, 3),
        hf.NoRepeatNGramLogitsProcessor(3),
        hf.NoBadWordsLogitsProcessor([[7], [5, 1]]),
        hf.MinLengthLogitsProcessor(8, [3, 4]),
        hf.MinNewTokensLengthLogitsProcessor(4, 4, [3]),
        hf.ForcedEOSTokenLogitsProcessor(10, [3, 4]),
        hf.ExponentialDecayLengthPenalty((1, 1.3), [3, 4], 4),
        hf.SuppressTokensAtBeginLogitsProcessor([2, 5], 7),
        hf.TemperatureLogitsWarper(0.6),
        hf.TopKLogitsWarper(5),
    ],
    "sequence bias": [
        hf.SequenceBiasLogitsProcessor({(3,): -2.0, (5, 2): 1.5, (1, 4, 6): 3.0, (7, 2): 0.1})
    ],
    "forced first": [hf.ForcedBOSTokenLogitsProcessor(4)],
    "forced last": [hf.ForcedEOSTokenLogitsProcessor(8, [3, 4])],
    "decay": [hf.ExponentialDecayLengthPenalty((1, 1.3), [3, 4], 4)],
    "decay below one": [hf.ExponentialDecayLengthPenalty((3, 0.7), [3], 4)],
    "suppress at begin": [hf.SuppressTokensAtBeginLogitsProcessor([2, 5], 7)],
    "padding left out": [ignoring(2, 0, 3)],
    "order": [
        hf.TemperatureLogitsWarper(0.6),
        hf.RepetitionPenaltyLogitsProcessor(1.7),
        hf.TopKLogitsWarper(5),
        hf.NoRepeatNGramLogitsProcessor(2),
    ],
}
POINTWISE = {
    "temperature": [hf.TemperatureLogitsWarper(0.6)],
    "top k": [hf.TopKLogitsWarper(4)],
    "top h": [hf.TopHLogitsWarper(0.7)],
    "top p": [hf.TopPLogitsWarper(0.7)],
    "min p": [hf.MinPLogitsWarper(0.2)],
    "typical": [hf.TypicalLogitsWarper(0.7)],
    "epsilon": [hf.EpsilonLogitsWarper(0.05)],
    "eta": [hf.EtaLogitsWarper(0.05)],
    "suppress": [hf.SuppressTokensLogitsProcessor([2, 5])],
    "normal": [hf.TemperatureLogitsWarper(2.0), hf.LogitNormalization()],
}


def made(name):
    processors = LogitsProcessorList({**PREFIX, **POINTWISE}[name])
    biases = any(isinstance(each, hf.SequenceBiasLogitsProcessor) for each in processors)
    if biases and not BIASES_IN_BLOCKS:
        pytest.skip("biases of sequences run in blocks since transformers 5.23")
    return processors


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*PREFIX, *POINTWISE])
@pytest.mark.parametrize("rows", [(0, 1, 2), (2, 0), (1,)], ids=str)
@pytest.mark.parametrize("width", [1, 4])
def test_a_block_is_processed_as_plain_decoding_would(name, rows, width):
    processors = made(name)
    drafts, logits = block(len(rows), width)
    here = context(rows)
    sampler = Sampler(processors)
    assert sampler.reads_prefix == (name in PREFIX)
    if sampler.reads_prefix:
        here.write(drafts)
    expected = plain(processors, context(rows), drafts, logits)
    assert torch.equal(sampler.scores(logits, here), expected)


@pytest.mark.matrix
@pytest.mark.parametrize("name", PREFIX)
@pytest.mark.parametrize("rows", [(0, 1, 2), (2, 0), (1,)], ids=str)
def test_a_tree_is_processed_as_plain_decoding_would(name, rows):
    """Every position of every tree, with the branch that leads to it."""
    source = torch.Generator().manual_seed(1)
    parents = torch.tensor([[0, 0, 1, 2, 2, 5], [0, 1, 2, 3, 4, 5], [0, 0, 0, 2, 2, 0]])[list(rows)]
    drafts = torch.randint(0, VOCAB, parents.shape, generator=source)
    logits = torch.randn(len(rows), 7, VOCAB, generator=source)
    processors = made(name)
    scores = Sampler(processors).tree_scores(logits, context(rows), drafts, Tree(parents, 6, 4))
    for position in range(7):
        for place in range(len(rows)):
            branch, at = [], position
            while at:
                branch, at = [drafts[place, at - 1], *branch], int(parents[place, at - 1])
            alone = logits[:, :1].expand(-1, len(branch) + 1, -1).clone()
            alone[place, -1] = logits[place, position]
            behind = torch.zeros(len(rows), len(branch), dtype=torch.long)
            behind[place] = torch.tensor(branch, dtype=torch.long)
            expected = plain(processors, context(rows), behind, alone)[place, -1]
            assert torch.equal(scores[place, position], expected)


@pytest.mark.parametrize("lengths", [(1, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("name", PREFIX)
def test_short_texts_are_processed_as_plain_decoding_would(name, lengths):
    """N-grams and biased sequences may be longer than the text, and the first token forced."""
    tokens, rows = text()[:, :3], [0, 1]
    here, again = (Context(tokens.clone(), [*lengths, 2], rows) for _ in range(2))
    drafts, logits = block(2, 3)
    here.write(drafts)
    processors = made(name)
    expected = plain(processors, again, drafts, logits)
    assert torch.equal(Sampler(processors).scores(logits, here), expected)


def test_a_subclass_of_a_pointwise_processor_is_trusted_with_nothing():
    class Warmer(hf.TemperatureLogitsWarper):
        def __call__(self, input_ids, scores):
            return scores / (1 + (input_ids == 3).sum(-1, keepdim=True))

    assert Sampler(LogitsProcessorList([Warmer(0.5)])).walks
    assert not Sampler(LogitsProcessorList([hf.TemperatureLogitsWarper(0.5)])).walks


def test_positions_of_a_draft_are_offset_from_the_settled_text():
    """Drafting processes one position at a time; the verification sees the same prefixes."""
    processors = LogitsProcessorList(PREFIX["order"])
    drafts, logits = block(3, 4)
    whole, steps = context(), context()
    whole.write(drafts)
    at_once = Sampler(processors).scores(logits, whole)
    for position in range(4):
        one = Sampler(processors).scores(logits[:, position : position + 1], steps, position)
        torch.testing.assert_close(one[:, 0], at_once[:, position])
        if position < 3:
            steps.write(drafts[:, position : position + 1], offset=position)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 3000])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("least", [1, 5])
@pytest.mark.parametrize("threads", [1, 64])
def test_top_p_keeps_what_transformers_keeps_to_the_last_of_equal_scores(
    dtype, vocab, top_p, least, threads, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    seeded = torch.Generator().manual_seed(vocab)
    scale = torch.tensor([0.02, 0.5, 2.0, 9.0]).repeat(6)[:, None]
    logits = (torch.randn(24, vocab, generator=seeded) * scale).to(dtype)
    logits[-1, 0] = torch.nan
    before = [hf.TopKLogitsWarper(50)] if least > 1 else []
    processors = [*before, hf.TopPLogitsWarper(top_p, min_tokens_to_keep=least)]
    expected = LogitsProcessorList(processors)(torch.zeros(24, 1).long(), logits.float())
    rows = Context(torch.zeros(24, 9).long(), [1] * 24, list(range(24)))
    scores = Sampler(LogitsProcessorList(processors)).scores(logits[:, None], rows)
    torch.testing.assert_close(scores[:, 0], expected, rtol=0, atol=0, equal_nan=True)
    if vocab == 3000 and dtype is torch.bfloat16 and top_p == 0.9:
        ordered = logits.float().sort(-1).values
        assert (ordered[:, 1:] == ordered[:, :-1]).any(), "no scores are equal"


@pytest.mark.parametrize("name", POINTWISE)
def test_scores_of_a_smaller_vocabulary_are_drawn_from_as_if_it_were_the_whole(name):
    ids = torch.tensor([8, 1, 3, 4, 10])
    drafted, processors = DraftVocabulary(VOCAB, ids), LogitsProcessorList(POINTWISE[name])
    seeded = torch.Generator().manual_seed(3)
    logits, sampler = torch.randn(3, 1, len(ids), generator=seeded), Sampler(processors)
    whole = Sampler(processors).scores(drafted.spread(logits, -torch.inf), context())
    scored = sampler.scored(drafted)
    assert (scored is drafted) == all(type(each) in BY_VALUE for each in processors)
    if scored is drafted:
        spread = drafted.spread(sampler.scores(logits, context()).softmax(-1), 0.0)
        torch.testing.assert_close(spread, whole.softmax(-1))


def test_logits_are_left_as_they_were():
    drafts, logits = block(3, 2)
    before = logits.clone()
    # Without processors the scores may be the logits themselves: nothing writes to them.
    for processors in (PREFIX["repetition"], POINTWISE["suppress"], []):
        here = context()
        here.write(drafts)
        scores = Sampler(LogitsProcessorList(processors)).scores(logits, here)
        assert (scores.data_ptr() != logits.data_ptr()) or not processors
        assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_are_float32_as_in_plain_decoding(dtype):
    _, logits = block(3, 2)
    scores = Sampler(LogitsProcessorList(POINTWISE["temperature"])).scores(
        logits.to(dtype), context()
    )
    assert scores.dtype == torch.float32


# The text


def test_a_write_is_not_settled_until_it_is_counted():
    here = context((2, 0))
    here.write(torch.tensor([[1, 2], [3, 4]]))
    assert list(here.lengths.values()) == list(LENGTHS)
    assert here.tokens[2, 7:9].tolist() == [1, 2] and here.tokens[0, 6:8].tolist() == [3, 4]
    here.padding = 9
    assert here.padded()[0].tolist() == [*text()[0, :6].tolist(), 9]
    assert torch.equal(here.tokens[1, :4], text()[1, :4])


def test_the_buffer_grows_and_keeps_its_text():
    here = context()
    here.write(torch.ones(3, 50, dtype=torch.long))
    assert here.tokens.shape[1] >= 57
    for row, length in enumerate(LENGTHS):
        assert torch.equal(here.tokens[row, :length], text()[row, :length])
        assert here.tokens[row, length : length + 50].tolist() == [1] * 50


# The text


@pytest.mark.parametrize("written", [False, True], ids=["on the host", "written, too"])
def test_what_is_settled_is_there_when_somebody_reads_it(written):
    """Rows grow by different numbers of tokens; the second has two of padding."""
    said = [[1, 2, 3], [4], [5, 6, 7]]
    here = Context(text()[:, :3].clone(), [3, 3, 3], [0, 2], said, padding=-1)
    emitted = {0: [], 2: []}
    for turn, counts in enumerate([(2, 1), (1, 3), (4, 1)]):
        block = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(turn))
        here.write(block + VOCAB)  # drafts, not all of which stand
        if written:
            here.write(block)
        for row, count, tokens in zip((0, 2), counts, block.tolist(), strict=True):
            here.commit(row, tokens[:count], written)
            emitted[row] += tokens[:count]
    assert list(here.lengths.values()) == [10, 3, 8] and here.text[1] == [4]
    for row, tokens in emitted.items():
        assert here.tokens[row, 3 : here.lengths[row]].tolist() == tokens
        assert here.new(row, 5) == tokens[2:] and not here.new(row, here.lengths[row])
    padded = here.padded()
    assert padded.shape == (3, 10) and torch.equal(padded[:, :3], text()[:, :3])
    assert bool((padded[1, 3:] == -1).all()) and bool((padded[2, 8:] == -1).all())


# Drawing


def test_greedy_takes_the_best_and_names_no_distribution():
    _, logits = block(3, 1)
    tokens, probs = Sampler().draw(logits[:, 0], context(), 0, DraftVocabulary(VOCAB))
    assert torch.equal(tokens, logits[:, 0].argmax(-1)) and probs is None


def test_a_drawn_token_comes_with_the_distribution_it_was_drawn_from():
    _, logits = block(1, 1)
    scores = logits[:, 0].expand(50_000, -1)
    sampler = Sampler(do_sample=True, generator=torch.Generator().manual_seed(0))
    tokens, probs = sampler.draw(scores, context(), 0, DraftVocabulary(VOCAB))
    torch.testing.assert_close(probs, scores.softmax(-1))
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    expected = probs[0].double() / probs[0].double().sum() * len(tokens)
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3


def test_draws_need_no_normalised_rows_and_keep_their_shape():
    probs = torch.zeros(2, 3, VOCAB)
    probs[..., 4] = 1e-8
    assert draw(probs).tolist() == [[4] * 3] * 2


@pytest.mark.parametrize("chance", [float("nan"), 0.0, float("inf")])
def test_of_broken_probabilities_some_token_is_drawn(chance):
    """A draft that is no token would end the call where nothing says why."""
    drawn = draw(torch.full((50, VOCAB), chance))
    assert bool(((drawn >= 0) & (drawn < VOCAB)).all())
