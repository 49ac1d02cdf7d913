"""Configs are strict: what they do not know they refuse, and say what was meant."""

import pytest
from pydantic import Field, ValidationError

from selfspec import DraftConfig
from selfspec.apps.cli.options import draft_config
from selfspec.config import StrictConfig, load_config, parse, read_text, unknown_name


class Section(StrictConfig):
    steps: int = Field(default=1, ge=1)
    rate: float = 0.5


class Experiment(StrictConfig):
    name: str = "run"
    section: Section = Section()
    layers: tuple[int, ...] = ()
    draft: DraftConfig = DraftConfig()


def write(folder, text):
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# Unknown keys


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("exit_leyer", "exit_layer"),
        ("exitlayer", "exit_layer"),
        ("num_drafts", "num_draft_tokens"),
        ("num_draft_token", "num_draft_tokens"),
        ("shedule", "schedule"),
        ("heads", "head"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, nearest):
    refusal = f"unknown key of DraftConfig: '{key}'; did you mean '{nearest}'"
    with pytest.raises(ValueError, match=refusal):
        DraftConfig.of({key: 1})
    with pytest.raises(ValidationError, match=f"did you mean '{nearest}'"):
        DraftConfig(**{key: 1})


def test_a_key_like_no_other_gets_the_list():
    with pytest.raises(ValueError) as refusal:
        DraftConfig.of({"zzz": 1})
    assert "did you mean" not in str(refusal.value)
    assert all(key in str(refusal.value) for key in DraftConfig.model_fields)


def test_unknown_name():
    assert "did you mean 'lens'?" in unknown_name("head kind", "len", ["shared", "lens"])
    assert unknown_name("x", "q", ["aa", "bb"]) == "unknown x: 'q'; known: aa, bb"


# Values


@pytest.mark.parametrize("k", [0, -1])
def test_drafts_of_no_length_are_refused_with_the_way_to_have_none(k):
    refusal = f"at least 1, got {k}; .*drafter='none'"
    with pytest.raises(ValueError, match=refusal):
        DraftConfig(num_draft_tokens=k)
    with pytest.raises(ValueError, match=refusal):
        DraftConfig.of({"num_draft_tokens": k})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exit_layer", -1),
        ("exit_layer", "two"),
        ("exit_layer", 2.5),
        ("num_draft_tokens", "many"),
        ("num_draft_tokens", 2.5),
        ("schedule", "sometimes"),
        ("confidence", 0),
        ("confidence", 1),
        ("drafter", 3),
        ("head", 3),
    ],
)
def test_a_bad_value_is_one_error_that_names_its_key(key, value):
    with pytest.raises(ValueError, match=f"^draft: {key}: ") as refusal:
        DraftConfig.of({key: value})
    assert "\n" not in str(refusal.value)


def test_several_bad_values_come_together():
    with pytest.raises(ValueError) as refusal:
        DraftConfig.of({"confidence": 3, "exit_layer": -1})
    assert len(str(refusal.value).splitlines()) == 2


def test_configs_cannot_be_changed():
    with pytest.raises(ValidationError):
        DraftConfig().exit_layer = 3


# What generate(draft=...) takes


def test_every_form_of_a_draft():
    config = DraftConfig(exit_layer=3, num_draft_tokens=2)
    assert DraftConfig.of(config) is config
    assert DraftConfig.of({"exit_layer": 3, "num_draft_tokens": 2}) == config
    assert DraftConfig.of("none") == DraftConfig(drafter="none")
    assert parse(Experiment, {"draft": "none"}, "file").draft == DraftConfig.of("none")
    assert draft_config(None, ["cascade", "num_draft_tokens=2"]) == DraftConfig(
        drafter="cascade", num_draft_tokens=2
    )
    assert DraftConfig.of(None) == DraftConfig.of({}) == DraftConfig()


@pytest.mark.parametrize("draft", [4, 0.5, True, ["none"], Section()])
def test_other_types_are_refused(draft):
    with pytest.raises(TypeError, match=f"a dict or a drafter's name, got {type(draft).__name__}"):
        DraftConfig.of(draft)


# Files and overrides


def test_a_file_and_its_overrides(tmp_path):
    path = write(tmp_path, "name: base\nsection:\n  steps: 3\n  rate: 0.1\n")
    assert load_config(Experiment, path).section == Section(steps=3, rate=0.1)
    changed = load_config(
        Experiment, path, ["section.rate=1e-3", "name=a=b", "layers=[1, 2]", "section.steps=7"]
    )
    assert changed == Experiment(name="a=b", section=Section(steps=7, rate=1e-3), layers=(1, 2))


def test_overrides_without_a_file():
    assert load_config(Experiment, None, ["section.steps=4"]).section.steps == 4
    assert load_config(Experiment, None) == Experiment()


def test_an_empty_file_means_the_defaults(tmp_path):
    assert load_config(Experiment, write(tmp_path, "# nothing\n")) == Experiment()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config file at .*absent\.yaml"):
        load_config(Experiment, tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        *((text, "must hold a YAML mapping") for text in ("- 1\n- 2\n", "just words\n", "3\n")),
        *((text, "") for text in ("a: [1, 2\n", "a: b: c\n", "\tname: x\n")),
        ("section: {steps: 0}\n", r"section\.steps: "),
        ("section: {step: 3}\n", r"section: unknown key of Section: 'step'.*'steps'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(tmp_path, text, match):
    with pytest.raises(ValueError, match=rf"config\.yaml.*{match}"):
        load_config(Experiment, write(tmp_path, text))
    with pytest.raises(ValueError, match=r"^here: name: "):
        parse(Experiment, {"name": 3}, "here")


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        *(([override], r"section\.field=value") for override in ("section.steps", "=3", "")),
        (["name=x", "name.first=y"], "'name' is a value, not a section"),
        (["sections.steps=4"], "did you mean 'section'"),
        (["section.steps=0"], r"section\.steps: .*greater than or equal to 1"),
        (["layers=[1, "], r"layers=\[1, "),
    ],
)
def test_overrides_are_checked_like_the_file(overrides, match):
    with pytest.raises(ValueError, match=match):
        load_config(Experiment, None, overrides)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    assert load_config(Experiment, write(tmp_path, "\ufeffname: mark\n")).name == "mark"
    assert read_text(write(tmp_path, "\ufefftext")) == "text"
