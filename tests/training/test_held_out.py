"""What heads learn and are measured by on packed text equals what the model says outright."""

import pytest
import torch
from conftest import VOCAB, tiny_llama
from families import build
from fit_tools import packed
from head_tools import own_head

from selfspec.decoder import Decoder
from selfspec.heads import BlockHead, FusedHead, SharedHead
from selfspec.heads.teacher_forcing import draft_states, target_states
from training.data import Blocks, collate
from training.exits.drafts import HeldOutDrafts
from training.exits.losses import LossSchedule, draft_losses
from training.exits.task import DraftLossConfig, ExitTask
from training.loop.optim import OptimizerConfig, make_optimizers

BLOCK = 12


@pytest.fixture
def target():
    return tiny_llama("sometimes")


@pytest.fixture
def decoder(target):
    return Decoder(target)


def text(*lengths, blocks=3, seed=0) -> Blocks:
    """Random tokens in documents of these lengths, again and again; without, one document."""
    size = blocks * BLOCK
    tokens = torch.randint(1, VOCAB, (size,), generator=torch.Generator().manual_seed(seed))
    ends = torch.tensor(lengths or (size,)).repeat(size)
    documents = torch.arange(len(ends)).repeat_interleave(ends)[:size]
    return packed(tokens, documents, BLOCK)


def pieces(blocks: Blocks):
    """The tokens of each document in each block."""
    for number in range(len(blocks)):
        block = blocks[number]
        for document in block.documents.unique():
            yield block.tokens[block.documents == document]


@torch.no_grad()
def outright(target, head, decoder, blocks):
    """p and q at every token but a piece's last, each piece read by the model on its own."""
    p, q = [], []
    for tokens in pieces(blocks):
        out = target(input_ids=tokens[None], output_hidden_states=True)
        drafted = head.logits(decoder, out.hidden_states[head.exit_layer])
        drafted = head.vocabulary(decoder).spread(drafted, -torch.inf)
        p.append(out.logits[0, :-1].softmax(-1))
        q.append(drafted[0, :-1].softmax(-1))
    return torch.cat(p), torch.cat(q)


def measure(decoder, head, blocks, depths=1, **options):
    (drafts,) = HeldOutDrafts(decoder, [head], blocks, depths, **options).measure(True)
    return drafts


# Held-out figures


@pytest.mark.matrix
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("kind", ["shared", "lens", "lora"])
@pytest.mark.parametrize("lengths", [(), (5, 1, 9), (3,)])
def test_alpha_and_agreement_are_the_models_own(target, decoder, kind, trimmed, lengths):
    head, blocks = own_head(decoder, kind, 2, trimmed=trimmed), text(*lengths)
    p, q = outright(target, head, decoder, blocks)
    drafts = measure(decoder, head, blocks, rows=2)
    accepted, agreed = torch.minimum(p, q).sum(-1), p.argmax(-1) == q.argmax(-1)
    assert drafts.alpha == pytest.approx([accepted.mean().item()])
    assert drafts.agreement == pytest.approx([agreed.double().mean().item()])
    assert drafts.accepted.sum().item() == pytest.approx(accepted.sum().item())


@pytest.mark.parametrize("kind", [BlockHead, FusedHead])
@pytest.mark.parametrize("lengths", [(), (7, 4, 13)])
def test_a_copy_of_the_last_layer_is_always_right(decoder, kind, lengths):
    """At any depth: before training a fused head does not listen to what it would be fed."""
    head = kind.build(decoder, decoder.depth - 1)
    drafts = measure(decoder, head, text(*lengths), depths=4)
    assert drafts.alpha == pytest.approx([1.0] * 4)
    assert drafts.agreement == [1.0] * 4


def test_a_document_counts_at_the_depths_that_it_reaches(decoder):
    """A document of n tokens has one draft less at each depth, and n - 1 at the first."""
    lengths = (5, 1, 4, 2)  # of one block
    drafts = measure(decoder, own_head(decoder, "fused", 2), text(*lengths), depths=4)
    counts = [3 * sum(max(0, n - 1 - depth) for n in lengths) for depth in range(4)]
    assert drafts.features[:, 3].long().bincount().tolist() == counts
    assert len(drafts.agreed) == len(drafts.accepted) == sum(counts)
    ends = torch.tensor(counts).cumsum(0)
    alphas = [part.mean().item() for part in drafts.accepted.tensor_split(ends[:-1])]
    assert drafts.alpha == pytest.approx(alphas)


@pytest.mark.parametrize("kind", ["lens", "fused"])
def test_how_blocks_are_batched_changes_nothing(decoder, kind):
    head, blocks = own_head(decoder, kind, 2), text(5, 9, blocks=5)
    one, many = (measure(decoder, head, blocks, depths=3, rows=rows) for rows in (1, 4))
    assert one.alpha == pytest.approx(many.alpha)
    assert one.agreement == pytest.approx(many.agreement)


def test_blocks_are_taken_at_even_distances(decoder):
    head, blocks = SharedHead.build(decoder, 2), text(blocks=7)
    some = HeldOutDrafts(decoder, [head], blocks, 1, most=3)
    wanted = [blocks[number].tokens for number in (0, 3, 6)]
    assert torch.equal(collate(some.blocks).tokens, torch.cat(wanted))
    assert some.positions == 3 * (BLOCK - 1)


def test_documents_that_are_all_too_short_are_refused(decoder):
    head = own_head(decoder, "fused", 2)
    with pytest.raises(ValueError, match="has 4 tokens before one that is to be learned"):
        HeldOutDrafts(decoder, [head], text(4), depths=4)
    nothing = text()
    nothing.trained[:] = False
    with pytest.raises(ValueError, match="has 1 tokens before one that is to be learned"):
        HeldOutDrafts(decoder, [head], nothing, depths=1)


def test_a_target_whose_heads_cannot_be_unrolled_says_so_at_once():
    decoder = Decoder(build("bloom", "eager"))
    blocks, fused = text(), FusedHead.build(decoder, 2)
    with pytest.raises(ValueError, match="depths must be 1, got 3"):
        HeldOutDrafts(decoder, [fused], blocks, depths=3)
    HeldOutDrafts(decoder, [BlockHead.build(decoder, 2)], blocks, depths=3)


# The loss


def task(decoder, *heads, depths=1, weights=(), share=1.0, **schedule):
    """A task that fits heads; what is held out does not matter here."""
    for head in heads:
        head.requires_grad_(True)
    config = DraftLossConfig(
        schedule=LossSchedule(**schedule),
        depths=depths,
        depth_weights=list(weights),
        share=share,
    )
    return ExitTask(decoder, heads, config, HeldOutDrafts(decoder, heads, text(), 1))


def batch(*lengths, untrained=()):
    """A batch of three blocks; the places `untrained` of each belong to a chat's prompt."""
    blocks = text(*lengths)
    for place in untrained:
        blocks.trained[place::BLOCK] = False
    return collate([blocks[number] for number in range(3)])


def test_the_loss_is_the_divergence_at_the_tokens_to_be_learned(target, decoder):
    head, untrained = own_head(decoder, "lens", 2), (0, 1, 2, 7)
    data = batch(5, 7, untrained=untrained)
    loss, each = task(decoder, head)(data, 0, 0.0)
    p, q = outright(target, head, decoder, text(5, 7))
    # Positions by the token that they predict: documents begin at 0 and 5.
    predicted = torch.tensor([n for n in range(BLOCK) if n not in (0, 5)]).repeat(3)
    learned = ~torch.isin(predicted, torch.tensor(untrained))
    divergence = (p * (p / q).log()).sum(-1)[learned].sum()
    assert loss.item() == pytest.approx(divergence.item())
    assert each["loss_lens_2"].item() == loss.item()


@pytest.mark.parametrize("kind", ["lens", "fused"])
def test_tokens_of_a_prompt_teach_nothing(decoder, kind):
    data = batch(untrained=range(BLOCK))
    heads = [own_head(decoder, kind, 2)]
    made = task(decoder, *heads, depths=2)
    assert made.terms(data) == 0
    loss, _ = made(data, 0, 0.0)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in heads[0].parameters())


@pytest.mark.matrix(share=1)
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("kind", ["block", "fused parallel"])
def test_the_confidence_output_learns_what_is_accepted(decoder, kind, trimmed):
    """And its loss moves nothing else."""
    head, data = own_head(decoder, kind, 2, trimmed=trimmed, confidence=True), batch(5, 7)
    made = task(decoder, head, depths=2, loss="tv")
    output, head.confidence = head.confidence, None
    alone = made(data, 0, 0.0)[0]
    alone.backward()
    expected = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.confidence = output
    head.zero_grad()
    loss = made(data, 0, 0.0)[0]
    loss.backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(head.get_parameter(name).grad, gradient)
    optimizer, losses = torch.optim.LBFGS(output.parameters(), max_iter=100), []

    def closure():
        output.zero_grad()
        loss = made(data, 0, 0.0)[0] - alone.detach()
        loss.backward()
        losses.append(loss.item())
        return loss

    optimizer.step(closure)
    assert losses[-1] < losses[0]
    # With a bias, a logistic regression is right on average.
    drafts = measure(decoder, head, text(5, 7), depths=made.config.depths)
    assert float(drafts.confidence.mean()) == pytest.approx(float(drafts.accepted.mean()), abs=1e-3)


def at_depth(decoder, head, data, depth, name):
    """Σ of a loss over the positions that a draft of this depth reaches."""
    reading = target_states(decoder, data.tokens, data.documents, head.input_layers)
    state = list(draft_states(decoder, head, reading, depth + 1))[depth]
    there = (data.targets != -100) & (data.positions >= depth)
    logits = [decoder.unembed(reading.normed)[there], head.logits(decoder, state)[there]]
    return draft_losses([name], *logits, data.targets[there], head.vocab_ids)[name].sum().item()


@pytest.mark.parametrize("trimmed", [False, True])
def test_depths_are_weighed(decoder, trimmed):
    head, data = own_head(decoder, "fused", 2, trimmed=trimmed), batch(5, 2, 5)
    weights = [2.0, 0.0, 1.0]
    loss, _ = task(decoder, head, depths=3, weights=weights, loss="tv")(data, 0, 0.0)
    sums = [at_depth(decoder, head, data, depth, "tv") for depth in range(3)]
    assert loss.item() == pytest.approx((2 * sums[0] + sums[2]) / 3, rel=1e-5)
    alike, _ = task(decoder, head, depths=3, loss="tv")(data, 0, 0.0)
    assert alike.item() == pytest.approx(sum(sums) / 3, rel=1e-5)


@pytest.mark.parametrize("kind", ["fused", "fused parallel"])
def test_fewer_positions_at_later_depths_give_the_same_loss_on_average(decoder, kind):
    head, data = own_head(decoder, kind, 2), batch(9)
    whole = task(decoder, head, depths=3)(data, 0, 0.0)[0].item()
    torch.manual_seed(0)
    parts = [task(decoder, head, depths=3, share=0.5)(data, 0, 0.0)[0].item() for _ in range(60)]
    assert len(set(parts)) > 30
    assert sum(parts) / len(parts) == pytest.approx(whole, rel=0.05)


def test_a_head_that_is_not_unrolled_has_one_depth(decoder):
    head, data = own_head(decoder, "block", 2), batch(5, 7)
    one, _ = task(decoder, head)(data, 0, 0.0)
    three, _ = task(decoder, head, depths=3, weights=[1, 5, 5])(data, 0, 0.0)
    assert one.item() == pytest.approx(at_depth(decoder, head, data, 0, "kl"), rel=1e-5)
    assert three.item() == one.item()


def test_losses_take_turns(decoder):
    head, data = own_head(decoder, "lens", 2), batch()
    made = task(decoder, head, then="acceptance", switch=0.4, blend=0.2)
    first, second = (at_depth(decoder, head, data, 0, name) for name in ("kl", "acceptance"))
    for progress, share in ((0.0, 0.0), (0.5, 0.5), (0.9, 1.0)):
        loss, _ = made(data, 0, progress)
        assert loss.item() == pytest.approx((1 - share) * first + share * second, rel=1e-5)


def test_heads_are_fitted_jointly_and_one_by_one_alike(decoder):
    heads = [own_head(decoder, "lens", 1), own_head(decoder, "fused", 2)]
    data, grads = batch(5, 7), []
    for group in ([heads[0]], [heads[1]], heads):
        loss, each = task(decoder, *group, depths=2)(data, 0, 0.0)
        assert loss.item() == pytest.approx(sum(v.item() for v in each.values()) / len(group))
        loss.backward()
        grads.append([p.grad.clone() for head in group for p in head.parameters()])
        for head in group:
            head.zero_grad()
    alone = grads[0] + grads[1]
    for together, own in zip(grads[2], alone, strict=True):
        torch.testing.assert_close(together * 2, own)


def test_a_shared_head_is_compared_with_and_not_fitted(decoder):
    lens, shared = own_head(decoder, "lens", 2), SharedHead.build(decoder, 2)
    both, alone = task(decoder, lens, shared), task(decoder, lens)
    data = batch()
    loss, each = both(data, 0, 0.0)
    assert each.keys() == {"loss_lens_2"}
    assert loss.item() == alone(data, 0, 0.0)[0].item()
    figures = both.evaluate()
    assert {"alpha_lens_2_1", "alpha_shared_2_1", "top1_shared_2"} < figures.keys()
    assert figures["rejected"] == pytest.approx(1 - figures["alpha_lens_2_1"])


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_changes_heads_and_no_bit_of_the_target(tied):
    target = tiny_llama("sometimes", dtype=torch.float32, tie_word_embeddings=tied)
    decoder = Decoder(target)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    kinds = {"lens": 2, "lora": 2, "block": 1, "fused": 0}
    heads = [own_head(decoder, kind, exit, trimmed=True) for kind, exit in kinds.items()]
    made = task(decoder, *heads, depths=2).train()
    assert not target.training and all(head.training for head in heads)
    own = {name for name, _ in made.named_parameters() if name.startswith("heads.")}
    assert {name for name, p in made.named_parameters() if p.requires_grad} == own
    was = {name: made.get_parameter(name).detach().clone() for name in own}
    (optimizer,) = make_optimizers(made, OptimizerConfig(lr=0.1))
    loss, _ = made(batch(5, 7), 0, 0.0)
    loss.backward()
    optimizer.step()
    assert all(not torch.equal(made.get_parameter(name), old) for name, old in was.items())
    assert all(parameter.grad is None for parameter in target.parameters())
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, before[name]), name
