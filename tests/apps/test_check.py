"""`selfspec check`: exact drafters pass, wrong ones do not, and the exit code says it."""

import itertools
import json

import pytest
import torch
from conftest import EXIT, tiny_llama
from scipy.stats import chi2
from typer.testing import CliRunner

from selfspec import SelfSpecModel
from selfspec.apps.bench import Sampling, check_exactness, exactness
from selfspec.apps.bench.exactness import chi_square, exact_probabilities
from selfspec.apps.cli import commands
from selfspec.config import DraftConfig
from selfspec.sampling.sampler import Sampler

DRAFT = DraftConfig(exit_layer=EXIT, num_draft_tokens=2)
PROMPTS = [torch.tensor([[5, 6, 7]])]


@pytest.fixture(scope="module")
def spec():
    return SelfSpecModel(tiny_llama("sometimes", dtype=torch.float32, spread=0.3))


def test_an_exact_drafter_passes(spec):
    found = check_exactness(spec, DRAFT, PROMPTS, 12, Sampling(samples=1024))
    assert found.passed
    assert (found.texts, found.divergences) == (1, {})
    assert found.distributed
    assert found.acceptance_rate is not None and 0 < found.acceptance_rate < 1


def test_drafts_drawn_from_another_distribution_are_caught(spec, monkeypatch):
    """The recorded q is not the q that was drawn from."""
    drawn = Sampler.draw

    def colder(self, scores, context, depth, scored):
        tokens, _ = drawn(self, scores / 0.4, context, depth, scored)
        return tokens, scores.softmax(-1)

    monkeypatch.setattr(Sampler, "draw", colder)
    found = check_exactness(spec, DRAFT, PROMPTS, 12, Sampling(samples=1024))
    assert found.equal
    assert found.distributed is False
    assert not found.passed


def test_a_token_that_plain_decoding_never_writes_is_caught(spec, monkeypatch):
    write = SelfSpecModel.generate

    def wrong(self, *args, **kwargs):
        output = write(self, *args, **kwargs)
        output[0, -1] = 0
        return output

    monkeypatch.setattr(SelfSpecModel, "generate", wrong)
    found = check_exactness(spec, DRAFT, PROMPTS, 12, Sampling(samples=64))
    assert found.p_values == [0.0]
    assert not found.equal
    assert not found.passed


@pytest.mark.parametrize(("wrong", "fails"), [(1, False), (16, True)])
def test_half_precision_may_swap_a_few_candidates_and_no_more(monkeypatch, wrong, fails):
    write = SelfSpecModel.generate

    def swapped(self, *args, **kwargs):
        output = write(self, *args, **kwargs)
        output[:wrong, -1] = 0
        return output

    spec = SelfSpecModel(tiny_llama("sometimes", dtype=torch.bfloat16, spread=1.0))
    monkeypatch.setattr(SelfSpecModel, "generate", swapped)
    found = check_exactness(spec, DRAFT, PROMPTS, 12, Sampling(samples=64))
    assert (found.p_values == [0.0]) == fails


def test_exact_probabilities_are_those_of_the_model(spec):
    options = Sampling(candidates=2, temperature=0.7).options([])
    joint = exact_probabilities(spec, PROMPTS[0], options, 3)
    assert sum(joint.values()) == pytest.approx(1)
    assert len(joint) == 8
    word = next(iter(joint))
    chance = 1.0
    for length in range(3):
        text = torch.cat([PROMPTS[0], torch.tensor([word[:length]], dtype=torch.long)], dim=1)
        best = spec.model(text).logits[0, -1].detach().topk(2)
        probs = (best.values / 0.7).softmax(-1)
        chance *= float(probs[best.indices.tolist().index(word[length])])
    assert joint[word] == pytest.approx(chance, rel=1e-4)


def test_candidates_that_may_be_swapped_are_not_sure():
    scores = torch.tensor([[5.0, 1.0, 3.0, 2.99, -torch.inf]]).double()
    probs, sure = exactness._candidates(scores, 2, margin=0.01)
    assert sure.tolist() == [[True, False, False, False, False]]
    first = float(torch.tensor([5.0, 3.0]).softmax(0)[0])
    assert probs[0].tolist() == pytest.approx([first, 0, 1 - first, 0, 0])
    for margin, most in ((0.0, 2), (0.01, 3)):
        assert exactness._candidates(scores, most, margin)[1].sum() == most
    assert exactness._candidates(scores, 5, 0.01)[1].tolist() == [[True] * 4 + [False]]


def test_what_may_be_swapped_is_left_out_of_the_continuations():
    spec = SelfSpecModel(tiny_llama("sometimes", dtype=torch.bfloat16, spread=0.3))
    options = Sampling().options([])
    all_, sure, none = (
        exact_probabilities(spec, PROMPTS[0], options, 3, margin) for margin in (0.0, 0.05, 1e3)
    )
    assert sure.items() < all_.items() and not none


def test_stop_tokens_end_no_continuation():
    stopping = SelfSpecModel(tiny_llama("sometimes", dtype=torch.float32, eos_token_id=[3, 4]))
    options = Sampling(candidates=60).options([3, 4])
    joint = exact_probabilities(stopping, PROMPTS[0], options, 1)
    assert len(joint) == 60
    assert not {(3,), (4,)} & set(joint)


@pytest.mark.parametrize("counts", [*itertools.product([4, 9, 20], repeat=2)])
def test_chi_square_is_scipys(counts):
    cells = [*zip(counts, (8.0, 11.0), strict=True), (14, 14.0)]
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    assert chi_square(cells) == pytest.approx(chi2.sf(statistic, 2))


@pytest.fixture
def folder(tmp_path, tokenizer):
    path = tmp_path / "tiny"
    tiny_llama("sometimes", dtype=torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)
    (tmp_path / "prompt.txt").write_text("the cat on the mat")
    return path


@pytest.mark.parametrize(("wrong", "code"), [(False, 0), (True, 1)])
def test_the_exit_code_says_it(folder, monkeypatch, wrong, code):
    write = SelfSpecModel.generate

    def planted(self, *args, **kwargs):
        output = write(self, *args, **kwargs)
        output[0, -4] = (output[0, -4] + 1) % 64
        return output

    if wrong:
        monkeypatch.setattr(SelfSpecModel, "generate", planted)
    options = ["--model", str(folder), "--file", str(folder.parent / "prompt.txt"), "-n", "12"]
    options += ["--draft", f"exit_layer={EXIT}", "--samples", "0"]
    shown = CliRunner().invoke(commands, ["check", *options])
    assert shown.exit_code == code, shown.output
    assert ("FAILED" if wrong else "passed") in shown.stdout
    result = CliRunner().invoke(commands, ["check", *options, "--json"])
    found = json.loads(result.stdout)
    assert (found["passed"], found["distributed"]) == (not wrong, None)
    assert [d["position"] for d in found["divergences"].values()] == ([8] if wrong else [])
