"""Tuning: predictions that follow rounds, rates that follow decoding, nothing measured twice."""

import io
import json
import random
import re
import struct
from collections import Counter

import pytest
import torch
from cli_tools import PROMPT, call, one_object
from conftest import EXIT, contrary, prompt, tiny_llama
from head_tools import own_head
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from selfspec import DraftConfig, SelfSpecModel
from selfspec.bench.prompts import cut_prompts, in_batches, padded, split_prompts
from selfspec.bench.tune import TuneConfig, run, tune
from selfspec.bench.tune.measure import (
    Written,
    conditional,
    measure_rates,
    measure_times,
    reach,
    write_on,
)
from selfspec.bench.tune.run import Runner, fastest
from selfspec.display import speedup_map, speedup_table, validation_table
from selfspec.heads import SharedHead
from selfspec.schedule.profile import (
    Profile,
    Validation,
    expected_tokens,
    interpolated,
    predict_speedup,
)

RATES = st.floats(0, 0.99)
TEXTS = [PROMPT, "the man is on the sand and the sea is near", "a boat on the sea; the sun is red"]
SMALL = {
    "lengths": [1, 3],
    "widths": [1, 3],
    "depths": 3,
    "prompt_tokens": 8,
    "prompts": 4,
    "new_tokens": 10,
    "turns": 1,
    "best": 2,
    "nodes": [4],
    "repeats": 2,
}
EXITS = ["shared 1", "lens 2", "shared 2"]


def small(**changes):
    return TuneConfig.model_validate(SMALL | changes)


# Predictions


@given(RATES, st.integers(0, 12), st.floats(0.01, 1), st.floats(1e-4, 10))
def test_with_one_rate_and_proportional_times_the_speedup_is_the_closed_form(alpha, k, c, seconds):
    """S = (1 - α^{k+1}) / ((1 - α)(kc + 1))."""
    found = predict_speedup([alpha] * 3, k, c * seconds, seconds, seconds)
    assert found == pytest.approx((1 - alpha ** (k + 1)) / ((1 - alpha) * (k * c + 1)))


@given(st.lists(RATES, min_size=1, max_size=6), st.integers(0, 6))
def test_a_round_emits_a_token_more_than_the_drafts_that_are_expected_to_stand(alphas, k):
    tokens = expected_tokens(alphas, k)
    assert 1 <= tokens <= k + 1
    assert expected_tokens(alphas, k + 1) >= tokens
    assert expected_tokens([alphas[0]], 1) == pytest.approx(1 + alphas[0])
    assert expected_tokens([1.0], k) == k + 1


def test_a_draft_stands_only_on_those_before_it():
    assert expected_tokens([0.5, 0.2, 0.9], 3) == pytest.approx(1 + 0.5 + 0.1 + 0.09)
    assert expected_tokens([0.5, 0.0, 1.0], 3) == pytest.approx(1.5)
    assert expected_tokens([0.5, 0.2], 3) == pytest.approx(1 + 0.5 + 0.1 + 0.02)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_predicted_speedup_is_that_of_simulated_rounds(k):
    alphas, shallow, verify, plain = [0.8, 0.6, 0.9], 0.2, 1.3, 1.0
    dice, emitted, rounds = random.Random(k), 0, 40_000
    for _ in range(rounds):
        kept = 0
        while kept < k and dice.random() < alphas[min(kept, len(alphas) - 1)]:
            kept += 1
        emitted += kept + 1
    simulated = emitted * plain / (rounds * (k * shallow + verify))
    found = predict_speedup(alphas, k, shallow, verify, plain)
    assert found == pytest.approx(simulated, rel=0.02)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: expected_tokens([], 2), "got 0 rates and 2"),
        (lambda: predict_speedup([0.5], -1, 1, 1, 1), "got 1 rates and -1"),
        (lambda: interpolated({}, 2), "got none"),
    ],
)
def test_what_predicts_nothing_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


def test_other_widths_lie_on_lines_between_the_measured_ones():
    measured = {1: 1.0, 3: 2.0, 9: 2.6}
    assert [interpolated(measured, w) for w in (1, 2, 3, 6, 9)] == pytest.approx(
        [1, 1.5, 2, 2.3, 2.6]
    )
    assert interpolated(measured, 19) == pytest.approx(3.6)
    assert interpolated({1: 1.0, 3: 0.9}, 7) == 0.9  # noise makes no pass faster than measured
    assert interpolated({4: 1.5}, 9) == 1.5


# Acceptance


@given(st.integers(1, 4), st.integers(0, 12), st.integers(0, 2**32))
def test_rates_by_depth_give_the_rounds_that_could_begin_at_any_token(depths, more, seed):
    source = torch.Generator().manual_seed(seed)
    kept = torch.randint(2, (depths, depths + more), generator=source).double()
    lengths = []
    for start in range(more + 1):
        along = [bool(kept[depth, start + depth]) for depth in range(depths)]
        lengths.append(1 + [*along, False].index(False))
    found = expected_tokens(conditional(reach(kept)), depths)
    assert found == pytest.approx(sum(lengths) / len(lengths))


@pytest.mark.parametrize("kind", ["shared", "lens", "block", "fused"])
def test_rates_are_those_of_real_rounds(kind):
    """From every token of the target's own text a call keeps as many drafts as was foretold."""
    model, config = tiny_llama("sometimes"), small(new_tokens=12)
    decoder = SelfSpecModel(model).engine.decoder
    spec = SelfSpecModel(model, heads=[own_head(decoder, kind, EXIT)])
    ids = prompt(9)[0][0]
    (text,) = write_on(spec, [ids], config)
    draft = DraftConfig(exit_layer=EXIT, head=kind, num_draft_tokens=config.depths)
    kept = []
    for start in range(len(text.tokens) - text.start - config.depths + 1):
        known = torch.tensor([text.tokens[: text.start + start]])
        # The prefill writes the pending token, the first round drafts behind it.
        spec.generate(known, draft=draft, max_new_tokens=config.depths + 2, do_sample=False)
        kept.append(spec.last_trace.rows[0][1].accepted)
    kept = kept[:-1]  # behind the last start nothing was written to compare with
    rates = measure_rates(decoder, spec.heads[0], [Written(text.tokens, text.start + 1)], config)
    assert expected_tokens(rates.agreement, config.depths) == pytest.approx(
        1 + sum(kept) / len(kept)
    )


def test_a_head_that_is_always_right_is_always_kept_and_one_that_never_is_never():
    for spec, rate in (
        (SelfSpecModel(tiny_llama("always")), 1.0),
        (contrary(tiny_llama(), EXIT), 0.0),
    ):
        decoder = spec.engine.decoder
        head = spec.heads[0] if spec.heads else SharedHead.build(decoder, EXIT)
        rates = measure_rates(decoder, head, write_on(spec, [prompt(8)[0][0]], small()), small())
        assert rates.agreement == pytest.approx([rate] * 3)
        assert rate or max(rates.alpha) < 0.5
        assert not rate or rates.alpha == pytest.approx([1.0] * 3)


# Times


@pytest.mark.parametrize("rows", [1, 3])
def test_every_pass_is_timed_and_the_model_is_left_as_it_was(rows):
    model = tiny_llama()
    decoder = SelfSpecModel(model).engine.decoder
    heads = [own_head(decoder, kind, EXIT) for kind in ("lens", "fused")]
    before = model.generate(prompt(6)[0], max_new_tokens=5)
    spec = SelfSpecModel(model, heads)
    turns = []
    found = measure_times(
        spec.engine,
        spec.heads,
        [prompt(5)[0][0], prompt(8)[0][0]],
        rows,
        small(turns=2),
        lambda done, of: turns.append((done, of)),
    )
    assert turns == [(1, 2), (2, 2)]
    assert all(seconds > 0 for table in found.verify.values() for seconds in table.values())
    assert list(found.shallow) == [EXIT] and list(found.verify) == [0, EXIT]
    assert all(list(table) == [1, 3] for table in [*found.shallow.values(), *found.verify.values()])
    assert list(found.drafts) == [f"lens {EXIT}", f"fused {EXIT}"]
    assert found.batch == rows and found.plain > 0 and found.rest >= 0
    assert all(draft.first > 0 for draft in found.drafts.values())
    assert torch.equal(model.generate(prompt(6)[0], max_new_tokens=5), before)


# Texts


def test_texts_are_cut_at_even_distances_and_every_other_prompt_is_kept_apart(tokenizer):
    long = " ".join(["the cat on the mat"] * 40)
    found = cut_prompts(tokenizer, [long], tokens=7, count=6)
    assert [len(part) for part in found] == [7] * 6
    whole = tokenizer(long).input_ids
    starts = [len(whole) // 7 * place // 6 * 7 for place in range(6)]
    assert [part.tolist() for part in found] == [whole[s : s + 7] for s in starts]
    measured, held_out = split_prompts(found)
    assert len(measured) == len(held_out) == 3
    assert split_prompts(found[:1]) == (found[:1], found[:1])
    assert (
        cut_prompts(tokenizer, ["a cat"], tokens=64, count=3)[0].tolist()
        == tokenizer("a cat").input_ids
    )


def test_batches_are_full():
    prompts = [torch.arange(1, n + 1) for n in (3, 5, 4)]
    assert [[len(p) for p in batch] for batch in in_batches(prompts, 2)] == [[3, 5], [4, 3]]
    assert [len(batch) for batch in in_batches(prompts, 7)] == [7]
    ids, mask = padded(prompts, torch.device("cpu"))
    assert ids[0].tolist() == [0, 0, 1, 2, 3] and mask.sum(-1).tolist() == [3, 5, 4]


# The whole


@pytest.fixture
def spec():
    model = tiny_llama("sometimes")
    decoder = SelfSpecModel(model).engine.decoder
    return SelfSpecModel(model, heads=[own_head(decoder, "lens", EXIT)])


@pytest.fixture
def counted(monkeypatch):
    """How often each part is measured; nothing is really written to be timed."""
    counts = Counter()

    def count(owner, name, measure=None):
        measure = measure or getattr(owner, name)

        def counting(*args, **kwargs):
            counts[name] += 1
            return measure(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for name in ("measure_times", "write_on", "measure_rates"):
        count(run, name)
    counters = dict.fromkeys(("rounds", "drafted", "accepted", "emitted", "prefilled"), 1)
    count(Runner, "run", lambda *_: {"tokens_per_second": 1.0, "text": "", **counters})
    count(Runner, "warm_up", lambda *_: None)
    return counts


@pytest.mark.parametrize("changes", [{}, {"batch": 2}, {"temperature": 0.7}], ids=str)
def test_a_profile_holds_what_was_measured_and_the_fastest_way(spec, tokenizer, changes):
    seen = []
    config = small(repeats=1, **changes)
    profile = tune(spec, tokenizer, TEXTS, config, on_progress=lambda *at: seen.append(at))
    assert [times.batch for times in profile.times] == sorted({1, config.batch})
    assert [rates.name for rates in profile.rates] == EXITS
    promised = [(found.name, found.num_draft_tokens) for found in profile.predictions]
    assert promised == [(name, k) for name in EXITS for k in (1, 3)]
    ran = {found.name: found for found in profile.validation}
    assert {"none", "optimal", "tree 4"} <= set(ran)
    assert (
        ran["none"].speedup == 1 and sum(found.predicted is not None for found in ran.values()) == 2
    )
    assert {found.equal for found in ran.values()} == {None if config.temperature else True}
    assert profile.draft == profile.validation[0].draft
    assert all(
        "draft_model" in reason or name != "two_model" for name, reason in profile.left_out.items()
    )
    assert {done == of for part, done, of in seen if part == "validation"} == {False, True}


def test_the_prediction_is_the_formula_over_the_measured_times(spec, tokenizer, counted):
    profile = tune(spec, tokenizer, TEXTS, small())
    times, rates = profile.times[0], {found.name: found for found in profile.rates}
    for found in profile.predictions:
        k, at, drafts = found.num_draft_tokens, found.exit_layer, times.drafts[found.name]
        drafting = drafts.first + (k - 1) * drafts.more + times.shallow[at][1]
        seconds = drafting + interpolated(times.verify[at], k + 1) + times.rest
        tokens = expected_tokens(rates[found.name].agreement, k)
        assert found.speedup == pytest.approx(tokens * times.plain / seconds)
        assert found.tokens == pytest.approx(tokens)


def test_nothing_is_measured_twice(spec, tokenizer, tmp_path, counted):
    work = tmp_path / "deep" / "profile.work.jsonl"
    first = tune(spec, tokenizer, TEXTS, small(), work)
    ways = len(first.validation)
    whole = {"measure_times": 1, "write_on": 1, "measure_rates": 3, "run": 2 * ways}
    assert counted == whole | {"warm_up": ways}
    assert tune(spec, tokenizer, TEXTS, small(), work) == first
    assert counted == whole | {"warm_up": ways}
    tune(spec, tokenizer, TEXTS, small(repeats=3), work)
    assert counted == whole | {"run": 3 * ways, "warm_up": 2 * ways}


@pytest.mark.parametrize("at", [("acceptance", 2), ("validation", 5)], ids=str)
def test_an_interrupted_tuning_goes_on_where_it_was(spec, tokenizer, tmp_path, counted, at):
    work = tmp_path / "profile.work.jsonl"

    def interrupt(part, done, of):
        if (part, done) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(spec, tokenizer, TEXTS, small(), work, interrupt)
    work.write_text(work.read_text()[:-9])  # the machine went down while a line was written
    ways = len(tune(spec, tokenizer, TEXTS, small(), work).validation)
    again = counted - Counter(measure_times=1, write_on=1, measure_rates=3, run=2 * ways)
    del again["warm_up"]
    assert again == {"measure_rates" if at[0] == "acceptance" else "run": 1}
    before = counted.total()
    tune(spec, tokenizer, TEXTS, small(), work)
    assert counted.total() == before


def test_what_belongs_to_other_heads_or_texts_is_measured_anew(spec, tokenizer, tmp_path, counted):
    work = tmp_path / "profile.work.jsonl"
    tune(spec, tokenizer, TEXTS, small(), work)
    tune(spec, tokenizer, TEXTS[:1], small(), work)
    assert counted["measure_times"] == 2
    with torch.no_grad():
        next(spec.heads[0].parameters()).add_(1.0)
    tune(spec, tokenizer, TEXTS, small(), work)
    assert counted["measure_times"] == counted["write_on"] == 3


def test_the_fastest_way_that_writes_the_right_text_is_chosen():
    def ran(name, speedup, equal=True):
        draft = DraftConfig(drafter=name)
        return Validation(name=name, draft=draft, tokens_per_second=1, speedup=speedup, equal=equal)

    plain = ran("none", 1.0)
    assert fastest([ran("tree", 1.5, equal=False), ran("auto", 1.2), plain]).drafter == "auto"
    assert fastest([plain, ran("early_exit", 0.9)]).drafter == "none"
    assert fastest([ran("early_exit", 1.3, equal=None), plain]).drafter == "early_exit"


@pytest.mark.parametrize(
    ("texts", "changes", "message"),
    [
        ([""], {}, "the 1 texts hold no token"),
        (TEXTS, {"exits": [4]}, r"exit_layer must be in \[1, 3\], got 4"),
        (
            TEXTS,
            {"new_tokens": 500},
            "the model has 128; lower prompt_tokens, new_tokens or widths",
        ),
    ],
    ids=["no text", "no such exit", "too long"],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_measured(
    spec, tokenizer, counted, texts, changes, message
):
    with pytest.raises(ValueError, match=message):
        tune(spec, tokenizer, texts, small(**changes))
    assert not counted


# The map


@pytest.fixture
def profile(spec, tokenizer, counted):
    return tune(spec, tokenizer, TEXTS, small())


def printed(*what):
    paper = io.StringIO()
    Console(file=paper, width=100).print(*what)
    return paper.getvalue()


def test_the_tables_show_every_prediction_and_every_run(profile):
    shown = printed(speedup_table(profile))
    for found in profile.predictions:
        (line,) = [line for line in shown.splitlines() if line.strip().startswith(found.name)]
        assert f" {found.speedup:.2f} " in line
    shown = printed(validation_table(profile))
    for found in profile.validation:
        (line,) = [line for line in shown.splitlines() if f" {found.name} " in line]
        assert f"{found.speedup:.2f}x" in line and "equal" in line
        assert ("→" in line) == (found.draft == profile.draft)
    with pytest.raises(ValueError, match="no predictions"):
        speedup_table(profile.model_copy(update={"predictions": []}))


def test_the_map_has_a_cell_for_every_prediction(profile):
    from matplotlib.figure import Figure

    ax = speedup_map(profile, Figure().add_subplot())
    cells = [text.get_text() for text in ax.texts]
    assert cells == [f"{found.speedup:.2f}" for found in profile.predictions]
    assert [label.get_text() for label in ax.get_yticklabels()] == [r.name for r in profile.rates]


# The command


def options(**changes):
    fields = {key: json.dumps(value) for key, value in (SMALL | changes).items()}
    return [part for key, value in fields.items() for part in ("--set", f"{key}={value}")]


def test_the_command_writes_a_profile_that_generate_takes(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS))
    common = ("tune", "--model", folder, "--text", text, *options(repeats=1))
    result = call(*common, "--json")
    found = one_object(result)
    assert result.stderr.splitlines() == ["times of passes, batch 1", "acceptance", "validation"]
    path = tmp_path / "tiny" / "selfspec_profile.json"
    assert found["output"] == str(path)
    profile = Profile.load(path)
    assert profile.model_dump(mode="json").items() <= found.items()
    drafted = one_object(call("generate", PROMPT, "--model", folder, "-n", 4, "--json"))["draft"]
    assert drafted == profile.draft.model_dump(mode="json")
    drafted = one_object(
        call("generate", PROMPT, "-m", folder, "-n", 4, "--json", "-d", "exit_layer=3")
    )
    assert drafted["draft"]["exit_layer"] == 3
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    width, height = struct.unpack(">II", path.with_suffix(".png").read_bytes()[16:24])
    assert width > 600 and height > 300
    shown = call(*common).stdout  # from the work file
    assert "predicted speedup" in shown and "on held-out prompts" in shown
    assert f"{found['validation'][0]['tokens_per_second']:.1f}" in shown


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--set", "batch=0"], "batch: Input should be greater than or equal to 1"),
        (["--set", "length=[1]"], "did you mean 'lengths'?"),
        (["--text", "/no/such/file"], "no prompt file at /no/such/file"),
        (["--set", "exits=[9]"], "exit_layer must be in [1, 3], got 9"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(folder, wrong, says):
    result = call("tune", "--model", folder, "--json", *wrong, code=1)
    assert result.stdout == ""
    assert re.fullmatch(r"selfspec: .*\n", result.stderr)
    assert says in result.stderr
