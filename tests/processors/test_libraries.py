"""Grammar libraries as logits processors: the text of plain decoding with every drafter.

`make test-processors` installs them in an environment of its own.
"""

import json
import re
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel

LIBRARIES = ("xgrammar", "outlines", "llguidance", "logits_processor_zoo")
MISSING = [name for name in LIBRARIES if find_spec(name) is None]
pytestmark = [
    pytest.mark.processors,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{MISSING} not installed; `make test-processors` installs them"
    ),
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]

DRAFTS = {
    "default": None,
    "early exit": DraftConfig(exit_layer=8),
    "cascade": DraftConfig(drafter="cascade", exit_layer=8),
    "auto": DraftConfig(drafter="auto", exit_layer=8),
    "tree": DraftConfig(drafter="tree", exit_layer=8),
    "lookahead": "lookahead",
    "prompt lookup": "prompt_lookup",
    "skip sublayers": {"drafter": "skip_sublayers", "skip": {"attention": [9], "mlp": [9]}},
    "two models": "two_model",
}


def record(**properties):
    """A JSON schema of an object with just these keys."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


WORD, YES = {"type": "string", "pattern": "^[a-z]{1,5}$"}, {"type": "boolean"}
SIZE = {"enum": ["small", "medium", "large"]}
SCHEMAS = [
    YES,
    SIZE,
    record(ok=YES),
    record(name=WORD),
    record(size=SIZE, sold=YES),
    record(first=WORD, last=WORD),
    record(kind={"const": "circle"}, filled=YES),
    record(temperature={"enum": [1, 2, 3]}, unit={"enum": ["C", "F"]}),
    record(inner=record(deep=YES)),
    {"type": "array", "items": YES, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": record(id=YES), "minItems": 2, "maxItems": 2},
    {"anyOf": [record(a=YES), record(b=SIZE)]},
]
REGEXES = [
    r"[0-9]{3}-[0-9]{4}",
    r"(yes|no|maybe)",
    r"#[0-9a-f]{6}",
    r"[A-Z][a-z]{2,6} [A-Z][a-z]{2,6}",
    r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]",
    r"(red|green|blue)(, (red|green|blue)){1,3}",
    r"v[0-9]\.[0-9]\.[0-9](-beta)?",
    r"https://[a-z]{3,8}\.(com|org)/[a-z]{1,8}",
]
CASES = [*((None, schema) for schema in SCHEMAS), *((regex, None) for regex in REGEXES)]
LONGEST = 64


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def spec(target):
    small = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    return SelfSpecModel(target, draft_model=small)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def made(target, tokenizer):
    """`made(library, regex, schema)` compiles once and returns what makes a new processor."""
    known = {}

    def of(library, regex, schema):
        key = library, regex, json.dumps(schema)
        if key not in known:
            known[key] = compiled(target, tokenizer, library, regex, schema)
        return known[key]

    return of


def compiled(model, tokenizer, library, regex, schema):
    if library == "xgrammar":
        import xgrammar.contrib.hf

        vocab = model.config.vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab)
        compiler = xgrammar.GrammarCompiler(info)
        if regex is None:
            grammar = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        else:
            grammar = compiler.compile_regex(regex)
        return lambda: xgrammar.contrib.hf.LogitsProcessor(grammar)
    import outlines
    from outlines.backends import get_regex_logits_processor
    from outlines_core.json_schema import build_regex_from_schema

    backend = library.removeprefix("outlines, ")
    if regex is None:  # its JSON may have any number of blanks, with which small models go on
        regex = build_regex_from_schema(json.dumps(schema), whitespace_pattern="[ ]?")
    wrapped = outlines.from_transformers(model, tokenizer)
    first = get_regex_logits_processor(backend, wrapped, regex)

    def new():
        first.reset()  # as outlines does before each use
        return first

    return new


GRAMMARS = ["xgrammar", "outlines, outlines_core", "outlines, xgrammar", "outlines, llguidance"]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("case", CASES, ids=[str(place) for place in range(len(CASES))])
@pytest.mark.parametrize("library", GRAMMARS)
def test_every_drafter_writes_the_constrained_text_of_plain_decoding(
    spec, tokenizer, made, library, case, sampled
):
    regex, _ = case
    new, ids = made(library, *case), tokenizer("The answer: ", return_tensors="pt").input_ids
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": LONGEST, "top_k": 0}

    def write(draft):
        config = DraftConfig.of(draft) if draft is not None else spec.draft_for(sampled)
        if sampled:
            config = config.model_copy(update={"rule": "coupled"})
        generator = torch.Generator().manual_seed(7)
        sampling = {"do_sample": sampled, "generator": generator, "logits_processor": [new()]}
        return spec.generate(ids, **options, **sampling, draft=config)

    plain = write("none")
    if not sampled:
        own = spec.model.generate(ids, **options, do_sample=False, logits_processor=[new()])
        assert torch.equal(plain, own)
    for draft in DRAFTS.values():
        assert torch.equal(write(draft), plain), draft
    text = tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
    assert json.loads(text) is not None if regex is None else re.fullmatch(regex, text)


@pytest.mark.parametrize("schema", SCHEMAS[2:6], ids=str)
@pytest.mark.parametrize("backend", ["outlines_core", "xgrammar", "llguidance"])
def test_a_schema_as_outlines_itself_compiles_it(spec, target, tokenizer, backend, schema):
    """Its JSON may have any number of blanks, so a text may be cut before it has ended."""
    import outlines
    from outlines.backends import get_json_schema_logits_processor

    wrapped = outlines.from_transformers(target, tokenizer)
    processor = get_json_schema_logits_processor(backend, wrapped, json.dumps(schema))
    given, texts = tokenizer("The answer: ", return_tensors="pt"), []
    options = {"max_new_tokens": LONGEST, "do_sample": False, "logits_processor": [processor]}
    for draft in [*DRAFTS.values(), "none"]:
        processor.reset()
        texts.append(spec.generate(**given, **options, draft=draft))
        assert torch.equal(texts[-1], texts[0]), draft
    processor.reset()
    assert torch.equal(spec.model.generate(**given, **options), texts[0])
    new = texts[0][0, given.input_ids.shape[1] :]
    if tokenizer.eos_token_id in new:
        json.loads(tokenizer.decode(new, skip_special_tokens=True))


@pytest.mark.parametrize("library", GRAMMARS)
def test_rows_and_requests_have_a_grammar_each(spec, tokenizer, made, library):
    """A batch of `generate` in step, and requests of `generate_batch` on their own."""
    new = made(library, None, record(size=SIZE, sold=YES, name=WORD))
    texts = ["The answer: ", "A much longer question, and then", "Yes"]
    given = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": LONGEST, "do_sample": False}
    own = spec.model.generate(**given, **options, logits_processor=[new()])
    for draft in DRAFTS.values():
        got = spec.generate(**given, **options, logits_processor=[new()], draft=draft)
        assert torch.equal(got, own)
    prompts = [tokenizer(text).input_ids for text in texts]
    found = spec.generate_batch(prompts, batch_size=2, logits_processor=[new()], **options)
    for prompt, output in zip(prompts, found.values(), strict=True):
        own = spec.model.generate(torch.tensor([prompt]), **options, logits_processor=[new()])
        assert output.error is None
        assert output.generated_tokens == own[0, len(prompt) :].tolist()


@pytest.mark.parametrize("library", sorted({*GRAMMARS} - {"outlines, outlines_core"}))
def test_forced_text_takes_few_rounds(spec, tokenizer, made, library):
    """Of a text that is mostly forced, the default draft verifies many tokens at once.

    `outlines_core` knows which tokens it allows, but not what they stand for.
    """
    keys = ["name", "colour", "weight", "available", "colour", "comment"]
    new = made(
        library,
        None,
        {
            "type": "array",
            "items": record(**dict.fromkeys(keys, YES)),
            "minItems": 3,
            "maxItems": 3,
        },
    )
    given = tokenizer("The answer: ", return_tensors="pt")
    output = spec.generate(**given, max_new_tokens=200, do_sample=False, logits_processor=[new()])
    assert output.shape[1] > 2.5 * spec.last_stats.rounds


def zoo(tokenizer, rows):
    from logits_processor_zoo.transformers import (
        CiteFromPromptLogitsProcessor,
        ForceLastPhraseLogitsProcessor,
        GenLengthLogitsProcessor,
        MultipleChoiceLogitsProcessor,
        TriggerPhraseLogitsProcessor,
    )

    return {
        "length": lambda: GenLengthLogitsProcessor(tokenizer, boost_factor=0.2),
        "cite": lambda: CiteFromPromptLogitsProcessor(tokenizer, boost_factor=2.0),
        "last phrase": lambda: ForceLastPhraseLogitsProcessor(" The end.", tokenizer, rows),
        "trigger": lambda: TriggerPhraseLogitsProcessor(
            tokenizer, rows, " wait", " the", trigger_count=2
        ),
        "choice": lambda: MultipleChoiceLogitsProcessor(tokenizer, ["a", "b"]),
    }


@pytest.mark.parametrize("name", ["length", "cite", "last phrase", "trigger", "choice"])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_zoo_of_processors_is_exact(spec, tokenizer, name, rows):
    texts = ["It was the best of times, it was the worst of times.", "She said that the"][:rows]
    given = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    new, options = zoo(tokenizer, rows)[name], {"max_new_tokens": 30, "do_sample": False}
    own = spec.model.generate(**given, **options, logits_processor=[new()])
    for draft in ["none", *DRAFTS.values()]:
        got = spec.generate(**given, **options, logits_processor=[new()], draft=draft)
        assert torch.equal(got, own), draft
