"""Tuning: every draft is run, the fastest right one is chosen, nothing is run twice."""

import io
import json
import re
import struct
from collections import Counter
from dataclasses import asdict

import pytest
import torch
from cli_tools import PROMPT, call, one_object
from conftest import EXIT, tiny_llama
from head_tools import own_head
from rich.console import Console

from selfspec import DraftConfig, SelfSpecModel
from selfspec.apps.bench.prompts import cut_prompts, make_batches
from selfspec.apps.bench.run import Written
from selfspec.apps.bench.tune import _WARM_UP, TuneConfig, fastest, tune, whole_models
from selfspec.apps.display.plots import speedup_map, speedup_table, validation_table
from selfspec.schedule.profile import Measured, Profile
from selfspec.schedule.stats import Stats

TEXTS = [PROMPT, "the man is on the sand and the sea is near", "a boat on the sea; the sun is red"]
SMALL = {
    "lengths": [1, 3],
    "prompt_tokens": 8,
    "prompts": 4,
    "new_tokens": 10,
    "best": 2,
    "nodes": [4],
    "repeats": 2,
    "precisions": [],
    "windows": [],
}
EXITS = ["shared 1", "lens 2", "shared 2"]
CHAINS = [f"{name} × {k}" for name in EXITS for k in (1, 3)]


def small(**changes):
    return TuneConfig.model_validate(SMALL | changes)


# Texts


def test_texts_are_cut_at_even_distances_and_every_other_prompt_is_kept_apart(tokenizer):
    long = " ".join(["the cat on the mat"] * 40)
    found = cut_prompts(tokenizer, [long], tokens=7, count=6)
    assert [len(part) for part in found] == [7] * 6
    whole = tokenizer(long).input_ids
    starts = [len(whole) // 7 * place // 6 * 7 for place in range(6)]
    assert [part.tolist() for part in found] == [whole[s : s + 7] for s in starts]
    assert (
        cut_prompts(tokenizer, ["a cat"], tokens=64, count=3)[0].tolist()
        == tokenizer("a cat").input_ids
    )


def test_batches_are_full():
    prompts = [torch.arange(1, n + 1) for n in (3, 5, 4)]
    found = make_batches(prompts, 2, torch.device("cpu"))
    assert [batch.mask.sum(-1).tolist() for batch in found] == [[3, 5], [4, 3]]
    assert found[0].tokens[0].tolist() == [0, 0, 1, 2, 3] and found[0].mask.dtype == torch.long
    assert [batch.rows for batch in make_batches(prompts, 7, torch.device("cpu"))] == [7]


# The whole


@pytest.fixture
def spec():
    model = tiny_llama("sometimes")
    decoder = SelfSpecModel(model).decoder
    return SelfSpecModel(model, heads=[own_head(decoder, "lens", EXIT)])


@pytest.fixture
def counted(monkeypatch):
    """How often each draft is run; nothing is really generated to be timed."""
    counts = Counter()

    def make(spec, config):
        def write(batch, options, seed):
            counts[config.name] += options["max_new_tokens"] != _WARM_UP
            stats = asdict(Stats(drafted=1, accepted=1, emitted=1, rounds=1))
            return Written([[0]] * batch.rows, [1], [1 / (1 + len(config.name))], [], stats)

        return write

    monkeypatch.setattr("selfspec.apps.bench.tune.make_method", make)
    return counts


@pytest.mark.parametrize("changes", [{}, {"batch": 2}, {"temperature": 0.7}], ids=str)
def test_a_profile_holds_every_run_and_the_fastest_draft(spec, tokenizer, changes):
    seen = []
    config = small(repeats=1, **changes)
    profile = tune(spec, tokenizer, TEXTS, config, on_progress=lambda *at: seen.append(at))
    assert [ran.name for ran in profile.screening] == CHAINS
    best = sorted(profile.screening, key=lambda ran: -ran.speedup)[:2]
    ran = {found.name: found for found in profile.validation}
    assert {"none", "optimal", "tree 4", "auto", *(found.name for found in best)} <= set(ran)
    assert ran["none"].speedup == 1
    every = [*profile.screening, *profile.validation]
    assert {found.equal for found in every} == {None if config.temperature else True}
    assert profile.draft == profile.validation[0].draft
    speeds = [found.speedup for found in profile.validation]
    assert speeds == sorted(speeds, reverse=True)
    assert list(profile.left_out) == ["two_model"] and "draft_model" in str(profile.left_out)
    for part in ("exits and lengths", "comparison"):
        assert {done == of for name, done, of in seen if name == part} == {False, True}


def test_the_whole_model_is_tried_with_fewer_bits_and_keys(spec, tokenizer, counted):
    tried = small(precisions=["int4", "int8"], windows=[4, 100], lengths=[2])
    profile = tune(spec, tokenizer, TEXTS, tried)
    whole = {ran.name: ran.draft for ran in profile.screening if ran.name.startswith("whole")}
    bits = ("model", "int4", "int8", "int4, LM head int8")
    kinds = [f"whole {what}{keys}" for what in bits for keys in ("", ", 4 keys")]
    assert [*whole] == [f"{kind} × 2" for kind in kinds[1:]]  # 100 keys are more than there are
    assert {draft.exit_layer for draft in whole.values()} == {spec.engine.decoder.depth}
    # The longest name is the fastest here; others that draft with a model do it in the same way.
    best = whole["whole model, 4 keys × 2"]
    ran = {found.name: found.draft for found in profile.validation}
    for name in ("optimal", "tree 4", "auto", "cascade"):
        assert (ran[name].window, ran[name].exit_layer) == (best.window, best.exit_layer)
    assert ran["prompt_lookup"].window is None and [*profile.left_out] == ["two_model"]


def test_what_cannot_be_copied_is_left_out(spec, monkeypatch):
    found, left_out = whole_models(spec.engine, small(precisions=["int4"], windows=[4]), 64)
    assert len(found) == 3 and not left_out
    monkeypatch.setattr("selfspec.apps.bench.tune.usable_memory", lambda device: 0.0)
    found, left_out = whole_models(spec.engine, small(precisions=["int4"]), 64)
    assert not found and "GB more memory" in left_out["whole int4"]


def test_copies_that_fit_into_memory_together_are_tried(spec, monkeypatch):
    """What a draft reads stays in memory while the next one is tried."""
    decoder, config = spec.decoder, small(precisions=["int4", "int8"], windows=[4])
    weights = sum(
        weight.nbytes for part in (spec.model, *spec.heads) for weight in part.parameters()
    )
    four, eight = (sum(decoder.copy_bytes(bits).values()) for bits in ("int4", "int8"))
    mixed = "int4, LM head int8"
    for room, refused in (
        (0, {"int4", "int8", mixed}),
        (four, {"int8", mixed}),
        (four + eight, set()),
    ):
        monkeypatch.setattr(
            "selfspec.apps.bench.tune.usable_memory", lambda device, room=room: weights + room
        )
        found, left_out = whole_models(spec.engine, config, 64)
        names = {name.removeprefix("whole ").removesuffix(", 4 keys") for name in left_out}
        assert names == refused
        assert "whole model, 4 keys" in found  # which has no copy


def test_nothing_is_run_twice(spec, tokenizer, tmp_path, counted):
    work = tmp_path / "deep" / "profile.work"
    first = tune(spec, tokenizer, TEXTS, small(prompts=2), work)
    compared = len(first.validation)
    runs = 1 + len(CHAINS) + 2 * compared
    assert counted.total() == runs
    assert tune(spec, tokenizer, TEXTS, small(prompts=2), work) == first
    assert counted.total() == runs
    tune(spec, tokenizer, TEXTS, small(prompts=2, repeats=3), work)
    assert counted.total() == runs + compared


@pytest.mark.parametrize("at", [("exits and lengths", 2), ("comparison", 5)], ids=str)
def test_an_interrupted_tuning_goes_on_where_it_was(spec, tokenizer, tmp_path, counted, at):
    work = tmp_path / "profile.work"

    def interrupt(part, done, of):
        if (part, done) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(spec, tokenizer, TEXTS, small(prompts=2), work, interrupt)
    runs = work / "runs.jsonl"
    runs.write_text(runs.read_text()[:-9])  # the machine went down while a line was written
    profile = tune(spec, tokenizer, TEXTS, small(prompts=2), work)
    assert counted.total() == 1 + len(CHAINS) + 2 * len(profile.validation) + 1
    tune(spec, tokenizer, TEXTS, small(prompts=2), work)
    assert counted.total() == 1 + len(CHAINS) + 2 * len(profile.validation) + 1


def test_runs_of_other_heads_or_texts_are_made_anew(spec, tokenizer, tmp_path, counted):
    work = tmp_path / "profile.work"
    tune(spec, tokenizer, TEXTS, small(prompts=2), work)
    tune(spec, tokenizer, TEXTS[1:2], small(prompts=2), work)
    assert counted["lens 2 × 1"] == 2  # once each: not among the best
    with torch.no_grad():
        next(spec.heads[0].parameters()).add_(1.0)
    tune(spec, tokenizer, TEXTS, small(prompts=2), work)
    assert counted["lens 2 × 1"] == 3


def test_the_fastest_draft_whose_output_is_right_is_chosen():
    def ran(name, speedup, equal=True):
        draft = DraftConfig(drafter=name)
        return Measured(name=name, draft=draft, tokens_per_second=1, speedup=speedup, equal=equal)

    plain = ran("none", 1.0)
    assert fastest([ran("tree", 1.5, equal=False), ran("auto", 1.2), plain]).drafter == "auto"
    assert fastest([plain, ran("early_exit", 0.9)]).drafter == "none"
    assert fastest([ran("early_exit", 1.3, equal=None), plain]).drafter == "early_exit"


def test_a_draft_that_changes_the_output_is_told(spec, tokenizer, monkeypatch):
    generate = SelfSpecModel.generate

    def wrong(self, tokens, draft, **options):
        more = draft.drafter == "tree"
        options["max_new_tokens"] -= more
        return generate(self, tokens, draft=draft, **options)

    monkeypatch.setattr(SelfSpecModel, "generate", wrong)
    profile = tune(spec, tokenizer, TEXTS, small())
    assert {ran.name for ran in profile.validation if not ran.equal} == {"tree 4"}


def test_a_draft_that_fails_is_left_out_with_its_reason(spec, tokenizer, monkeypatch):
    generate = SelfSpecModel.generate

    def broken(self, tokens, draft, **options):
        if draft.drafter in failing:
            raise RuntimeError("out of luck")
        return generate(self, tokens, draft=draft, **options)

    monkeypatch.setattr(SelfSpecModel, "generate", broken)
    failing = {"tree"}
    profile = tune(spec, tokenizer, TEXTS, small())
    assert profile.left_out["tree 4"] == "RuntimeError: out of luck"
    assert "tree 4" not in {ran.name for ran in profile.validation}
    failing = {"none"}
    with pytest.raises(RuntimeError, match=r"no drafts can be compared: .* out of luck"):
        tune(spec, tokenizer, TEXTS, small())


@pytest.mark.parametrize(
    ("texts", "changes", "message"),
    [
        ([""], {}, "the 1 texts hold no token"),
        (TEXTS, {"exits": [4]}, r"exit_layer must be in \[1, 3\], got 4"),
        (
            TEXTS,
            {"new_tokens": 500},
            "the model has 128; lower prompt_tokens or new_tokens",
        ),
    ],
    ids=["no text", "no such exit", "too long"],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_run(
    spec, tokenizer, counted, texts, changes, message
):
    with pytest.raises(ValueError, match=message):
        tune(spec, tokenizer, texts, small(**changes))
    assert not counted.total()


def test_nothing_to_try_is_refused_with_the_reason(spec, tokenizer, counted):
    bare = SelfSpecModel(spec.model)
    with pytest.raises(ValueError, match=r"no draft to try .*precisions and windows name none"):
        tune(bare, tokenizer, TEXTS, small(exits=[]))
    assert not counted.total()


# The map


@pytest.fixture
def profile(spec, tokenizer, counted):
    return tune(spec, tokenizer, TEXTS, small(precisions=["int8", "int4"]))


def printed(*what):
    paper = io.StringIO()
    Console(file=paper, width=100).print(*what)
    return paper.getvalue()


def test_the_tables_show_every_run(profile):
    shown = printed(speedup_table(profile))
    for found in profile.screening:
        name = found.name.partition(" ×")[0]
        (line,) = [line for line in shown.splitlines() if line.strip().startswith(f"{name}  ")]
        assert f" {found.speedup:.2f} " in line
    shown = printed(validation_table(profile))
    for found in profile.validation:
        (line,) = [line for line in shown.splitlines() if f" {found.name} " in line]
        assert f"{found.speedup:.2f}x" in line and "equal" in line
        assert ("→" in line) == (found.draft == profile.draft)
    with pytest.raises(ValueError, match="no measured chains"):
        speedup_table(profile.model_copy(update={"screening": []}))


def test_the_map_has_a_cell_for_every_chain(profile):
    from matplotlib.figure import Figure

    ax = speedup_map(profile, Figure().add_subplot())
    cells = [text.get_text() for text in ax.texts]
    assert cells == [f"{found.speedup:.2f}" for found in profile.screening]
    wholes = ["whole int8", "whole int4", "whole int4, LM head int8"]
    assert [label.get_text() for label in ax.get_yticklabels()] == [*EXITS, *wholes]


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
    assert result.stderr.splitlines() == ["exits and lengths", "comparison"]
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
    assert "speedup over plain" in shown and "on held-out prompts" in shown
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
