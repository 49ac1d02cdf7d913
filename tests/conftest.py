"""Tiny targets, exits that agree with them as often as wanted, and the laws of every round."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SequenceBiasLogitsProcessor,
)

from selfspec import SelfSpecModel, debug
from selfspec.debug import Watched
from selfspec.heads import SharedHead

torch.set_num_threads(1)
# A profile that the developer made must not change what the tests draft with.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="selfspec-tests-")

ROOT = Path(__file__).parents[1]
VOCAB = 64
EXIT = 2
TINY: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
TINY |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
# Options that change how a text is written and not what it is.
OURS = {"draft", "prefill_chunk_size", "past_key_values", "assistant_model", "assistant_tokenizer"}
# Biases of sequences, bad words among them, run in blocks since transformers 5.23.
BIASES_IN_BLOCKS = hasattr(SequenceBiasLogitsProcessor({(1,): 1.0}), "multi_token_biases")
# What the layers above the exit add, scaled: all of it, a little, nothing.
AGREEMENT = {"seldom": 1.0, "sometimes": 0.1, "always": 0.0}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of cases in which every value of a matrix occurs, `make test` runs every second one.

    With `share=n` it runs every nth; which one is the first differs from test to test. The other
    cases are slow.
    """
    matrices: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("matrix"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in matrices.items():
        (mark,) = cases[0].iter_markers("matrix")
        enough, share = covering(cases), mark.kwargs.get("share", 2)
        chosen = enough[crc32(name.encode()) % min(share, len(enough)) :: share]
        for case in cases:
            if case not in chosen:
                case.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave modules and tests, which stay to the end, out of every later garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """At exit everything is collected as ever."""
    gc.unfreeze()


def covering(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Cases in which every value of every parameter occurs, none much more often than others."""
    values = {
        case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases
    }
    uses, chosen = Counter[tuple[str, int]](), list[pytest.Function]()

    def new(case: pytest.Function) -> int:
        return sum(not uses[value] for value in values[case])

    def used(case: pytest.Function) -> int:
        return sum(uses[value] for value in values[case])

    while new(best := max(cases, key=lambda case: (new(case), -used(case)))):
        chosen.append(best)
        uses.update(values[best])
    return chosen


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    """`selfspec info` and `fit` time every device once, and not for seconds."""
    monkeypatch.setattr("selfspec.apps.bench.forecast._SECONDS", 0.0)
    monkeypatch.setattr("selfspec.apps.bench.forecast._TURNS", 1)


@pytest.fixture
def untimed(monkeypatch):
    """Devices are not timed at all, but judged by the bytes of weights."""

    def refuse(*_):
        raise RuntimeError("not in this test")

    monkeypatch.setattr("selfspec.apps.bench.forecast.measure_device", refuse)


def tiny_llama(
    agreement: str = "sometimes",
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    spread: float = 0.5,
    **config,
) -> LlamaForCausalLM:
    """A random Llama whose exit at layer `EXIT` agrees with it seldom, sometimes or always."""
    shape = {
        **TINY,
        "max_position_embeddings": 128,
        # A small spread makes greedy text of a random model one token, again and again.
        "initializer_range": spread,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(shape | config))).to(dtype).eval()
    return quieten(model, AGREEMENT[agreement])


@torch.no_grad()
def quieten(model: LlamaForCausalLM, factor: float, above: int = EXIT) -> LlamaForCausalLM:
    """Scale what the layers above an exit write to the residual stream."""
    for layer in model.model.layers[above:]:
        layer.self_attn.o_proj.weight *= factor
        layer.mlp.down_proj.weight *= factor
    return model


def prompt(*lengths: int, seed: int = 1, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Random rows of the given lengths, left-padded with 0, and their attention mask."""
    source = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    ids = torch.randint(1, vocab, (len(lengths), width), generator=source)
    return ids * mask, mask.long()


def greedy(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, **options):
    """What the model's own `generate` writes."""
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, do_sample=False, **options)


def greedy_logits(
    spec: SelfSpecModel,
    *lengths: int,
    draft: Any = "none",
    vocab: int = VOCAB,
    new_tokens: int = 14,
) -> Tensor:
    """All logits `[tokens, rows, vocab]` of a greedy call on prompts of these lengths."""
    ids, mask = prompt(*lengths, vocab=vocab)
    out = spec.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        draft=draft,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(out.logits)


def equal_to_generate(spec: SelfSpecModel, ids: Tensor, mask=None, drafts=(), **options) -> Tensor:
    """Greedy text of `spec`, which must be what the model's own `generate` writes.

    A draft, or several in `drafts`, and what else only `spec` takes stand among the options.
    """
    mask = torch.ones_like(ids) if mask is None else mask
    own = {name: value for name, value in options.items() if name not in OURS}
    text = expected = greedy(spec.model, ids, mask, **own)
    for draft in drafts or [options.pop("draft", None)]:
        text = spec.generate(ids, attention_mask=mask, do_sample=False, draft=draft, **options)
        assert torch.equal(text, expected), draft
    return text


def requests_equal_to_generate(spec: SelfSpecModel, prompts, lengths=12, rows: int = 2, **options):
    """Greedy text of requests, `rows` of them at once, must be that of each prompt alone."""
    lengths = [lengths] * len(prompts) if isinstance(lengths, int) else lengths
    mine = {"batch_size": rows, "max_new_tokens": lengths, "do_sample": False}
    outputs = spec.generate_batch(prompts, **mine, **options)
    own = {name: value for name, value in options.items() if name not in OURS}
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    for ids, length, output in zip(prompts, lengths, outputs.values(), strict=True):
        text = greedy(spec.model, torch.tensor([ids]), max_new_tokens=length, **own)
        assert output.generated_tokens == text[0, len(ids) :].tolist()
    return outputs


class ContraryHead(SharedHead):
    """An exit that always proposes what it finds least likely: a drafter that is never right."""

    kind = "contrary"
    is_plain = False

    def forward(self, hidden: Tensor) -> Tensor:
        return -super().forward(hidden)


def contrary(model: PreTrainedModel, exit_layer: int) -> SelfSpecModel:
    """`model`, with a head that is never right."""
    head = ContraryHead.build(SelfSpecModel(model).decoder, exit_layer)
    return SelfSpecModel(model, heads=[head])


@contextmanager
def paused(module: torch.nn.Module, generate: Callable, *args, **options) -> Iterator[None]:
    """Meanwhile another thread generates, and stands still where it has called `module`."""
    inside, done, this = threading.Event(), threading.Event(), threading.current_thread()

    def pause(*_):
        if threading.current_thread() is not this and not inside.is_set():
            inside.set()
            done.wait(30)

    handle = module.register_forward_hook(pause)
    options = {"max_new_tokens": 6, **options}
    worker = threading.Thread(target=generate, args=args, kwargs=options)
    worker.start()
    assert inside.wait(30)
    try:
        yield
    finally:
        done.set()
        worker.join(30)
        handle.remove()


def gates(model: torch.nn.Module) -> list[str]:
    """Modules whose `forward` is replaced, or a child of which is shadowed."""
    return [
        name
        for name, module in model.named_modules()
        if {"forward", *module._modules} & set(module.__dict__)
    ]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens: bytes of English text, and a few of two and three letters."""
    merges = [("t", "h"), ("th", "e"), ("e", "r"), ("i", "n"), ("s", "t"), ("o", "p"), ("a", "n")]
    merges += [("Ġ", "a"), ("Ġ", "b"), ("o", "n"), ("r", "e"), ("x", "y"), ("xy", "z")]
    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ", *".,;:!?'-()0123456789"]
    tokens = ["<pad>", *letters, *(a + b for a, b in merges)]
    vocab = {token: index for index, token in enumerate([*tokens, "A", "B"])}
    assert len(vocab) == VOCAB
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")


@pytest.fixture
def folder(tmp_path, tokenizer) -> str:
    """A tiny checkpoint on disk, with its tokenizer."""
    path = tmp_path / "tiny"
    tiny_llama("sometimes").save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def as_loud_as_before() -> Iterator[None]:
    """The command line quietens transformers; the next test gets it back as it was."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield
    logging.set_verbosity(verbosity)
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()


@pytest.fixture
def watch() -> Iterator[Callable[[SelfSpecModel], Watched]]:
    """`watch(spec)`: from then on every round of `spec` is checked against the invariants."""
    with ExitStack() as stack:
        yield lambda spec: stack.enter_context(debug.watch(spec))


@pytest.fixture
def clock():
    """A clock that only moves when told to."""

    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    return Clock()
