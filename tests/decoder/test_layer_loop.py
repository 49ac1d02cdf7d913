"""One loop runs the layers of every pass, whatever a model's body does between them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import equal_to_generate, greedy, prompt, tiny_llama
from graph_tools import CpuTape, Meddling
from head_tools import own_head
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import selfspec
from selfspec import SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.decoder.kernels import compiled
from selfspec.decoder.kernels.graphs import RECORDERS
from selfspec.decoder.run import run_layers
from selfspec.heads import draft_states, target_states

PACKAGE = Path(selfspec.__file__).parent
LOOP = (run_layers.__code__.co_filename, run_layers.__name__)
DRAFTS = (
    "none",
    {"exit_layer": 2, "num_draft_tokens": 3},
    {"drafter": "tree", "exit_layer": 2, "num_draft_tokens": 3, "tree": {"nodes": 6}},
    {"drafter": "skip_sublayers", "skip": {"attention": [1, 3], "mlp": [2, 3]}},
)


def writes_the_same(spec, ids, drafts=DRAFTS, new_tokens=24):
    return equal_to_generate(spec, ids, drafts=drafts, max_new_tokens=new_tokens)


# Bodies that do more than hand hidden states from layer to layer


@pytest.mark.parametrize("meddle", ["", "first", "between", "in place"])
def test_a_body_that_does_more_has_its_layers_run_where_it_calls_them(meddle):
    model = tiny_llama(dtype=torch.float32)
    model.model.__class__ = Meddling
    model.model.meddle = meddle  # pyright: ignore[reportAttributeAccessIssue]
    spec = SelfSpecModel(model)
    writes_the_same(spec, prompt(6)[0], DRAFTS[:3])
    assert spec.decoder.gates.hands_on == (meddle in ("", "first"))


def test_a_body_may_do_more_for_some_inputs_only():
    model = tiny_llama(dtype=torch.float32)
    model.model.__class__ = Meddling
    ids = prompt(6)[0]
    plain = greedy(model, ids, max_new_tokens=24)[0, 6:].tolist()
    token = next(token for token in plain[4:] if token not in ids)
    model.model.meddle = token  # pyright: ignore[reportAttributeAccessIssue]
    spec = SelfSpecModel(model)
    assert token in writes_the_same(spec, ids, DRAFTS[:3])
    assert spec.decoder.gates.hands_on  # as the prompt, which has no such token, has shown


# One loop


@pytest.fixture
def callers(monkeypatch) -> list[bool]:
    """For every call of a layer while gates are in: whether the loop made it."""
    found: list[bool] = []
    own = LlamaDecoderLayer.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        files = []
        while frame is not None:
            files.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        if any(Path(name).is_relative_to(PACKAGE / "decoder") for name, _ in files):
            found.append(LOOP in files)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("kernels", ["eager", "direct", "prepacked", "compiled", "graphs"])
@pytest.mark.filterwarnings("ignore:nothing of LlamaForCausalLM can be prepacked")
def test_every_layer_of_a_round_is_called_by_the_loop(kernels, callers, monkeypatch):
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **options: function)
    monkeypatch.setitem(RECORDERS, "cpu", lambda device: CpuTape)
    target = tiny_llama("sometimes", dtype=torch.float32)
    heads = [own_head(Decoder(target), kind, 1) for kind in ("block", "fused")]
    spec = SelfSpecModel(target, heads=heads, kernels=kernels)
    callers.clear()  # of the check of the patched class, which also decodes plainly
    own = [{"head": kind, "exit_layer": 1, "num_draft_tokens": 3} for kind in ("block", "fused")]
    writes_the_same(spec, prompt(6)[0], (*DRAFTS, *own))
    assert len(callers) > 50 and all(callers)


@pytest.mark.parametrize("kind", ["block", "fused", "fused parallel"])
def test_every_layer_of_teacher_forcing_is_called_by_the_loop(kind, callers):
    decoder = Decoder(tiny_llama(dtype=torch.float32))
    head = own_head(decoder, kind, 1)
    ids = prompt(9)[0]
    states = target_states(decoder, ids, torch.zeros_like(ids), head.input_layers)
    assert len(list(draft_states(decoder, head, states, 2))) > 0
    assert len(callers) > decoder.depth and all(callers)


# Loops that hand a result of a call to the same call again. All but the first run something else.
LOOPS = {
    "decoder/run.py:run_layers": "the layers of a pass",
    "decoder/cache/recurrent.py:_after": "a kernel of one layer over the blocks of a round",
    "decoder/rotary.py:__call__": "a rotary embedding for the lengths in a pass",
    "decoder/wrapping_check.py:_plainly": "the model's own decoding over tokens",
    "heads/teacher_forcing.py:draft_states": "one layer over draft steps",
    "heads/teacher_forcing.py:_block_states": "memory over draft steps",
    "heads/teacher_forcing.py:_moved_features": "features over draft steps",
}


def names_of(argument: ast.expr) -> Iterator[str]:
    """Names that are an argument, or items of it."""
    if isinstance(argument, ast.Name):
        yield argument.id
    elif isinstance(argument, (ast.Starred, ast.Dict, ast.List, ast.Tuple)):
        for part in ast.iter_child_nodes(argument):
            yield from names_of(part) if isinstance(part, ast.expr) else ()


class Turn(ast.NodeVisitor):
    """Reads one turn of a loop in the order in which it runs."""

    def __init__(self, loop: ast.For | ast.While):
        self.given: set[str] = set()  # to calls, from before this turn
        self.assigned: set[str] = set()
        if isinstance(loop, ast.For):
            self.visit(loop.target)
        for statement in loop.body:
            self.visit(statement)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.assigned.add(node.id)

    def visit_Call(self, node: ast.Call) -> None:
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.given |= set(names_of(part)) - self.assigned
        self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        """Visit what is assigned after what it is computed from, and names before their use."""
        fields = dict(ast.iter_fields(node))
        order = ("value", "iter", "generators", "targets", "target")
        for name in [*(n for n in order if n in fields), *(n for n in fields if n not in order)]:
            parts = fields[name] if isinstance(fields[name], list) else [fields[name]]
            for part in parts:
                if isinstance(part, ast.AST):
                    self.visit(part)


def hands_on(loop: ast.For | ast.While) -> bool:
    """Whether a loop gives to a call what an earlier turn of it has assigned."""
    turn = Turn(loop)
    return bool(turn.given & turn.assigned)


def test_there_is_no_second_loop_over_layers():
    files = [*(PACKAGE / "decoder").rglob("*.py"), PACKAGE / "heads" / "teacher_forcing.py"]
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}:{function.name}"
        for path in files
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for loop in ast.walk(function)
        if isinstance(loop, (ast.For, ast.While)) and hands_on(loop)
    }
    assert found == LOOPS.keys()
