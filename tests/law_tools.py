"""Small targets and drafters to enumerate, rounds of them, and the statistics of what comes out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import chi2
from torch import Tensor

from selfspec.sampling.draft import Tree, Verdict

VOCAB = 5


def distributions(*shape: int, seed: int = 0) -> Tensor:
    """Random distributions over the vocabulary, some entries near zero."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, VOCAB, generator=source, dtype=torch.float64).mul(1.5).softmax(-1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One token for each row of `probs` `[rows, vocab]`."""
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Chi-square of all cells; those with less than 5 expected are joined into one.

    0 where something was counted that cannot be.
    """
    counts, expected = counts.flatten().double(), probs.flatten() * counts.sum()
    if counts[expected == 0].sum() > 0:
        return 0.0
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic.item(), len(expected) - 1))


@dataclass(frozen=True)
class Pair:
    """A target and a drafter whose tokens depend on the place and the token before.

    Attributes:
        target: `[k + 1, vocab, vocab]` p of each place, by the token before; the pending one is 0.
        draft: `[k, vocab, vocab]` q.
    """

    target: Tensor
    draft: Tensor

    @property
    def joint(self) -> Tensor:
        """`[vocab] * (k + 1)` probabilities of every text under the target."""
        exact = self.target[0][0]
        for table in self.target[1:]:
            exact = exact[..., None] * table
        return exact

    def reach(self, whole: bool) -> Tensor:
        """`[k]` chance that the first i drafts are kept, by enumeration.

        One by one it is the mean of the product of min(1, p / q); as a whole that of w_i, the
        product which is cut at 1 behind every draft.
        """
        chance = weight = _one_hot(torch.tensor(0))
        kept = []
        for p, q in zip(self.target, self.draft, strict=False):
            ratio = torch.where(q > 0, p / q, 0.0)
            chance = chance[..., None] * q
            weight = weight[..., None] * (ratio if whole else ratio.clamp(max=1))
            weight = weight.clamp(max=1)
            kept.append((chance * weight).sum())
        return torch.stack(kept)


def pair(kind: str, k: int) -> Pair:
    """A pair of the given kind for rounds of k levels."""
    target, other = distributions(k + 1, VOCAB), distributions(k + 1, VOCAB, seed=1)
    draft = other[:k]
    even = torch.arange(VOCAB) % 2 == 0
    if kind == "equal":
        draft = target[:k]
    elif kind == "too sure":  # where its favourite falls, the next candidates matter
        draft = 0.4 * draft + 0.6 * _one_hot(draft.argmin(-1))
    elif kind == "one-hot":
        draft = _one_hot(draft.argmax(-1))
    elif kind == "zeros":
        target = _only(target, torch.arange(VOCAB) != 3)
        draft = _only(draft, torch.arange(VOCAB) > 1)
    elif kind == "disjoint":
        target, draft = _only(target, even), _only(draft, ~even)
    return Pair(target, draft)


PAIRS = ["random", "too sure", "one-hot", "zeros", "equal", "disjoint"]


def _one_hot(tokens: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(tokens, VOCAB).double()


def _only(probs: Tensor, tokens: Tensor) -> Tensor:
    kept = probs * tokens
    return kept / kept.sum(-1, keepdim=True)


# Rounds


@dataclass
class Outcome:
    """What rounds of many rows made: the verdict, and how often each text of k + 1 tokens."""

    verdict: Verdict
    counts: Tensor

    @property
    def kept(self) -> Tensor:
        """`[k]` share of rows that kept the first i drafts."""
        places = torch.arange(1, self.verdict.tokens.shape[1])
        return (self.verdict.accepted[:, None] >= places).double().mean(0)


def written(pair: Pair, verdict: Verdict, generator: torch.Generator) -> Outcome:
    """Count texts; what a round leaves open is drawn from the target."""
    words = verdict.tokens.clone()
    for place in range(1, words.shape[1]):
        fresh = draw(pair.target[place][words[:, place - 1]], generator)
        words[:, place] = torch.where(place > verdict.accepted, fresh, words[:, place])
    cells = (words * VOCAB ** torch.arange(words.shape[1] - 1, -1, -1)).sum(-1)
    return Outcome(verdict, torch.bincount(cells, minlength=VOCAB ** words.shape[1]))


Rule = Callable[..., Verdict]


def chain_round(
    pair: Pair, rule: Rule, rows: int, seed: int = 0, ragged: bool = False, said: Any = None
) -> Outcome:
    """Draft chains and verify them.

    Args:
        pair: target and drafter.
        rule: what verifies.
        rows: chains.
        seed: of the draws.
        ragged: whether rows have 0 to k real drafts, and rubbish behind them.
        said: what becomes of q before the rule is told.
    """
    generator = seeded(seed)
    last = torch.zeros(rows, dtype=torch.long)
    tokens, draft_probs = [last], []
    for table in pair.draft:
        draft_probs.append(table[tokens[-1]])
        tokens.append(draw(draft_probs[-1], generator))
    q, counts = torch.stack(draft_probs, 1), None
    if ragged:
        k = len(pair.draft)
        counts = torch.randint(0, k + 1, (rows,), generator=generator)
        behind = torch.arange(k) >= counts[:, None]
        tokens[1:] = torch.stack(tokens[1:], 1).masked_fill(behind, 4).unbind(1)
        q = torch.where(behind[..., None], distributions(1, seed=9), q)
    target = [table[token] for table, token in zip(pair.target, tokens, strict=True)]
    q = q if said is None else said(q)
    verdict = rule(torch.stack(tokens[1:], 1), q, torch.stack(target, 1), generator, counts)
    return written(pair, verdict, generator)


@dataclass(frozen=True)
class Shapes:
    """Trees to draft, row by row in turn.

    Attributes:
        parents: of each tree; -1 is padding.
        levels: the most drafts on a branch of any.
        siblings: the most children of a place of any.
    """

    parents: list[list[int]]
    levels: int
    siblings: int

    def of(self, rows: int) -> Tensor:
        """`[rows, n]` parents."""
        return torch.tensor(self.parents)[torch.arange(rows) % len(self.parents)]


SHAPES = {
    "path": Shapes([[0, 1]], 2, 1),
    "fan": Shapes([[0, 0, 0]], 1, 3),
    "binary": Shapes([[0, 0, 1, 1, 2, 2]], 2, 2),
    "mixed": Shapes([[0, 1, 0, 1, 3, 2]], 3, 2),
    "rows": Shapes(
        [[0, 0, 0, -1, 1], [0, 1, -1, 1, -1], [-1, -1, -1, -1, -1], [0, 0, 1, 2, 0]], 2, 3
    ),
}


def tree_round(
    pair: Pair, rule: Rule, shapes: Shapes, rows: int, seed: int = 0, fault: str = "", **options
) -> Outcome:
    """Draft trees, siblings without replacement, and verify them.

    Args:
        pair: target and drafter.
        rule: what verifies.
        shapes: the trees.
        rows: how many.
        seed: of the draws.
        fault: what is done wrong while drafting.
        options: `certain=True` proposes the drafter's best tokens instead of drawing.
    """
    generator, certain = seeded(seed), options.get("certain", False)
    parents = shapes.of(rows)
    tree = Tree(parents, shapes.levels, shapes.siblings)
    ranks, depths, every = tree.ranks, tree.depths, torch.arange(rows)
    if fault == "out of order":
        alike = (parents[:, :, None] == parents[:, None]).sum(-1)
        ranks = alike - 1 - ranks
    tokens = torch.zeros(rows, parents.shape[1] + 1, dtype=torch.long)
    q = torch.zeros(*tokens.shape, VOCAB, dtype=torch.float64)
    order = torch.zeros(q.shape, dtype=torch.long)
    for place in range(tokens.shape[1]):
        if place:
            above = parents[:, place - 1].clamp_min(0)
            rank = ranks[:, place - 1].clamp(max=VOCAB - 1)
            tokens[:, place] = order[every, above, rank]
            if fault == "with replacement":
                tokens[:, place] = draw(q[every, above], generator)
        depth = depths[:, place].clamp(max=len(pair.draft) - 1)
        q[:, place] = pair.draft[depth, tokens[:, place]]
        race = 1.0 if certain else torch.empty(rows, VOCAB).exponential_(generator=generator)
        order[:, place] = (q[:, place] / race).argsort(-1, descending=True)
    if fault == "depends on the draw":
        unwanted = (ranks > 0) & (tokens[:, 1:] < 2)
        tree = Tree(parents.masked_fill(unwanted, -1), shapes.levels, shapes.siblings)
    target = pair.target[depths, tokens]
    verdict = rule(tokens[:, 1:], tree, None if certain else q, target, generator)
    return written(pair, verdict, generator)


def planted(function: Callable[..., Any], right: str, wrong: str) -> Callable[..., Any]:
    """`function` with a fault: its source says `wrong` where it said `right`."""
    source = inspect.getsource(function)
    assert source.count(right) == 1, (right, source)
    made: dict[str, Any] = {}
    exec(source.replace(right, wrong), function.__globals__, made)
    return made[function.__name__]
