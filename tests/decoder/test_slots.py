"""The cache: slot = position, one length per row, and what is rejected is never seen again."""

import inspect

import pytest
import torch
from conftest import EXIT, contrary, equal_to_generate, greedy, prompt, tiny_llama
from families import CASES_BY_FAMILY, model_of
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, LlamaConfig, MistralConfig

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder import CACHE
from selfspec.decoder.cache import SlotCache, join_rows, load_cache, store_cache, take_row
from selfspec.sampling.draft import Tree

HEADS, DIM = 2, 4


def states(*numbers):
    """KV `[rows, heads, width, dim]` whose every entry says which token it belongs to."""
    value = torch.tensor(numbers, dtype=torch.float64)[:, None, :, None]
    return value.expand(-1, HEADS, -1, DIM).clone()


def numbers(buffer):
    """The tokens that lie in a buffer."""
    assert bool((buffer == buffer[:, :1, :, :1]).all())
    return buffer[:, 0, :, 0].long().tolist()


def put(slots, *rows, offset=0):
    """Write tokens to every layer; values are the negated keys."""
    keys = states(*rows)
    with slots.writing(keys.shape[2], offset):
        return [slots.update(keys, -keys, layer) for layer in range(len(slots.layers))]


def ragged(windows=(None, 3), lengths=(2, 4, 3)):
    """Row r holds tokens 10r, 10r + 1, ... and has its own length."""
    slots = SlotCache(windows, len(lengths))
    put(slots, *([10 * row + i for i in range(max(lengths))] for row in range(len(lengths))))
    slots.commit(lengths)
    return slots


# Positions and masks


def test_positions_continue_each_row():
    slots = ragged()
    with slots.writing(2) as window:
        assert window.positions.tolist() == [[2, 3], [4, 5], [3, 4]]
        assert (window.end, window.uniform) == (6, False)
    with slots.writing(1, offset=3) as window:
        assert window.positions.tolist() == [[5], [7], [6]]
    slots.lengths = [4, 4, 4]
    with slots.writing(2) as window:
        assert window.positions.tolist() == [[4, 5]] * 3
        assert (window.end, window.uniform) == (6, True)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 100])
@pytest.mark.parametrize("lengths", [(0, 0), (4, 4), (2, 7, 0)], ids=str)
@pytest.mark.parametrize(("width", "offset"), [(1, 0), (1, 3), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_masks_are_those_of_brute_force(window, lengths, width, offset, dtype):
    slots = SlotCache([window], len(lengths))
    slots.commit(lengths)
    with slots.writing(width, offset):
        mask = slots.mask(window, dtype)
    end = max(lengths) + offset + width
    assert mask.shape == (len(lengths), 1, width, end) and mask.dtype == dtype
    for row, length in enumerate(lengths):
        for query in range(width):
            position = length + offset + query
            for key in range(end):
                sees = key <= position and (window is None or key > position - window)
                value = mask[row, 0, query, key].item()
                assert value == (0 if sees else torch.finfo(dtype).min)


# Place 4 continues place 2, which continues place 1; the second row has padding, the third a chain.
PARENTS = torch.tensor([[0, 1, 0, 2, 3], [0, 0, -1, 2, -1], [0, 1, 2, 3, 4]])


@pytest.mark.parametrize("window", [None, 1, 3, 5])
@pytest.mark.parametrize("lengths", [(4, 4, 4), (2, 7, 0)], ids=str)
@pytest.mark.parametrize(("place", "width"), [(0, 6), (0, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("added_from", [(0, 0, 0), (1, 3, 0)], ids=["whole", "partial"])
def test_masks_and_positions_of_trees_are_those_of_brute_force(
    window, lengths, place, width, added_from
):
    """A place sees the settled tokens and its own branch, as far back as its window."""
    slots, tree = SlotCache([window], 3), Tree(PARENTS, 5, 2)
    slots.commit(lengths)
    slots.added_from = list(added_from)
    with slots.writing(width, place, tree=tree) as active:
        mask, positions = slots.mask(window, torch.float64, added=True), active.positions
        assert active.slots.tolist() == [
            [length + place + i for i in range(width)] for length in lengths
        ]
    end = max(lengths) + place + width
    assert mask.shape == (3, 1, width, end)
    for row, length in enumerate(lengths):
        for query in range(width):
            branch = [place + query]
            while branch[0] > 0 and PARENTS[row, branch[0] - 1] >= 0:
                branch.insert(0, int(PARENTS[row, branch[0] - 1]))
            # Position of each slot that the branch is made of.
            seen = dict(enumerate(range(length)))
            seen |= {length + step: length + depth for depth, step in enumerate(branch)}
            own = seen[length + place + query]
            assert positions[row, query] == own
            for key in range(end):
                near = key in seen and (window is None or seen[key] > own - window)
                sees = near and key >= added_from[row]
                value = mask[row, 0, query, key].item()
                assert value == (0 if sees else torch.finfo(torch.float64).min)


def test_no_query_is_left_without_a_key():
    """A row of -inf would make NaN of a whole row."""
    slots = SlotCache([1], 2)
    slots.commit([0, 5])
    with slots.writing(3):
        assert bool((slots.mask(1, torch.float32) == 0).any(-1).all())


# Writing


def test_each_row_is_written_behind_its_own_tokens():
    slots = ragged()
    (keys, values), *_ = put(slots, [100, 101], [110, 111], [120, 121])
    assert numbers(keys)[0][:4] == [0, 1, 100, 101]
    assert numbers(keys)[1] == [10, 11, 12, 13, 110, 111]
    assert numbers(keys)[2][:5] == [20, 21, 22, 120, 121]
    assert torch.equal(values, -keys)


def test_rows_of_one_length_are_written_alike():
    slots = SlotCache([None], 2)
    put(slots, [1, 2], [3, 4])
    slots.commit([2, 2])
    ((keys, _),) = put(slots, [5], [6])
    assert numbers(keys) == [[1, 2, 5], [3, 4, 6]]


def test_what_was_rejected_is_overwritten_and_what_was_kept_stays():
    slots = ragged()
    put(slots, [100, 101, 102], [110, 111, 112], [120, 121, 122])
    slots.commit([1, 3, 0])
    assert slots.lengths == [3, 7, 3]
    ((keys, _), *_) = put(slots, [200], [210], [220])
    slots.commit([1, 1, 1])
    kept = [row[:length] for row, length in zip(numbers(keys), slots.lengths, strict=True)]
    assert kept == [[0, 1, 100, 200], [10, 11, 12, 13, 110, 111, 112, 210], [20, 21, 22, 220]]


def test_a_pass_in_steps_writes_what_one_pass_writes():
    whole, steps = ragged(), ragged()
    put(whole, *([100 + i for i in range(3)] for _ in range(3)))
    for i in range(3):
        put(steps, *([100 + i] for _ in range(3)), offset=i)
    for cache in (whole, steps):
        cache.commit([3, 3, 3])
    for row in range(3):
        for (one, _), (other, _) in zip(take_row(whole, row), take_row(steps, row), strict=True):
            assert torch.equal(one, other)


def test_growth_keeps_what_is_there():
    slots = ragged()
    kept = [take_row(slots, row) for row in range(3)]
    capacities = {slots.layers[0].capacity}
    put(slots, *([7] * 700 for _ in range(3)))
    assert slots.layers[0].capacity >= 704
    capacities.add(slots.layers[0].capacity)
    assert len(capacities) == 2
    for row in range(3):
        for (keys, values), (k, v) in zip(take_row(slots, row), kept[row], strict=True):
            assert torch.equal(keys, k) and torch.equal(values, v)


def test_capacity_is_reserved_once():
    slots = SlotCache([None], 2, capacity=50)
    put(slots, [1], [2])
    assert slots.layers[0].capacity == 50
    slots.commit([1, 1])
    pointer = slots.layers[0].keys.data_ptr()
    put(slots, [*range(49)], [*range(49)])
    assert slots.layers[0].keys.data_ptr() == pointer


def test_lengths_are_those_of_the_active_pass():
    """Mid-round the shallow layers hold more tokens than the deep ones."""
    slots = ragged()
    assert slots.get_seq_length() == 4
    with slots.writing(1, offset=2):
        assert slots.get_seq_length() == 6
        assert slots.get_mask_sizes(1, 0) == (7, 0)
        with slots.writing(3):
            assert slots.get_seq_length() == 4
        assert slots.get_seq_length() == 6
    assert slots.get_seq_length() == 4


def test_writes_outside_a_pass_are_refused():
    slots = ragged()
    with pytest.raises(RuntimeError, match="DynamicCache"):
        slots.update(states([1], [1], [1]), states([1], [1], [1]), 0)
    with pytest.raises(RuntimeError):
        slots.mask(None, torch.float32)
    with pytest.raises(RuntimeError, match="boom"), slots.writing(1):
        raise RuntimeError("boom")
    with pytest.raises(RuntimeError, match="SelfSpecModel"):
        slots.update(states([1], [1], [1]), states([1], [1], [1]), 0)


def test_the_models_own_generate_is_told_what_to_pass_instead():
    target = tiny_llama()
    ids, _ = prompt(4)
    out = SelfSpecModel(target).generate(ids, max_new_tokens=3, return_dict_in_generate=True)
    with pytest.raises(RuntimeError, match="for the model's own generate pass a"):
        greedy(target, out.sequences, max_new_tokens=2, **{CACHE: out.past_key_values})


# Trees, rows, and what a caller gets


def test_a_branch_is_gathered_into_place():
    slots = ragged()
    put(slots, *([100 * (row + 1) + i for i in range(5)] for row in range(3)))
    slots.gather(torch.tensor([[0, 2, 4], [0, 1, 3], [1, 3, 4]]))
    slots.commit([3, 3, 2])
    rows = [take_row(slots, row) for row in range(3)]
    kept = [[keys[0, :, 0].long().tolist() for keys, _ in row] for row in rows]
    assert kept[0] == [[0, 1, 100, 102, 104]] * 2
    assert kept[1] == [[10, 11, 12, 13, 200, 201, 203]] * 2
    assert kept[2] == [[20, 21, 22, 301, 303]] * 2


def test_a_branch_is_gathered_in_an_added_layer_too():
    """It has not seen the leaves, so its buffers may be shorter."""
    slots = SlotCache([None, None], 2, capacity=9)
    put(slots, [0, 1, 2], [10, 11, 12])
    slots.commit([3, 2])
    slots.add_layer(None, owner=None)
    inner, block = (
        states([100, 101, 102], [110, 111, 112]),
        states(range(100, 107), range(110, 117)),
    )
    with slots.writing(3, added={0: 1}):
        slots.update(inner, -inner, 0)
    slots.layers[2].hold([buffer[:, :, :6] for buffer in slots.layers[2].buffers])
    with slots.writing(7):
        for layer in range(2):
            slots.update(block, -block, layer)
    # The second row's branch ends earlier, which zeros say.
    slots.gather(torch.tensor([[0, 2, 6], [0, 1, 0]]))
    slots.commit([3, 2])
    for layer in slots.layers[:2]:
        assert numbers(layer.keys)[0][:6] == [0, 1, 2, 100, 102, 106]
        assert numbers(layer.keys)[1][:4] == [10, 11, 110, 111]
        assert torch.equal(layer.values[:, :, :4], -layer.keys[:, :, :4])
    assert numbers(slots.layers[2].keys)[0][3:5] == [100, 102]
    assert numbers(slots.layers[2].keys)[1][2:4] == [110, 111]


def test_the_branch_of_a_chain_moves_nothing():
    slots = ragged()
    put(slots, *([100, 101, 102] for _ in range(3)))
    before = slots.layers[0].keys.clone()
    slots.gather(torch.arange(3).expand(3, -1))
    assert torch.equal(slots.layers[0].keys, before)


@pytest.mark.parametrize("rows", [[2], [0, 2], [2, 0, 1], [1]], ids=str)
def test_select_keeps_rows_in_order(rows):
    slots = ragged()
    before = [take_row(slots, row) for row in range(3)]
    slots.select(rows)
    assert slots.rows == len(rows)
    assert slots.lengths == [(2, 4, 3)[row] for row in rows]
    for place, row in enumerate(rows):
        for now, then in zip(take_row(slots, place), before[row], strict=True):
            assert torch.equal(now[0], then[0]) and torch.equal(now[1], then[1])


def test_rows_make_a_cache_and_a_cache_makes_rows():
    slots = ragged()
    rows = [take_row(slots, row) for row in (2, 0, 1)]
    again = join_rows(rows, slots)
    assert again.lengths == [3, 2, 4]
    assert [layer.window for layer in again.layers] == [None, 3]
    for place, row in enumerate(rows):
        for now, then in zip(take_row(again, place), row, strict=True):
            assert torch.equal(now[0], then[0]) and torch.equal(now[1], then[1])
    ((keys, _), *_) = put(again, [5], [6], [7])
    assert numbers(keys)[1][:3] == [0, 1, 6]


def test_a_row_is_a_copy():
    slots = ragged()
    row = take_row(slots, 0)
    slots.layers[0].keys.zero_()
    assert numbers(row[0][0][None])[0] == [0, 1]


def test_nbytes_is_what_the_buffers_take():
    slots = SlotCache([None, 3], 3, capacity=32)
    assert slots.sizes.whole == 0
    put(slots, [1], [2], [3])
    assert slots.sizes.whole == 2 * 2 * (3 * HEADS * 32 * DIM) * 8


def test_reset_and_crop_forget_tokens():
    slots = ragged()
    slots.crop(-1)
    assert slots.lengths == [1, 3, 2]
    slots.crop(-2)
    assert slots.lengths == [0, 1, 0]
    slots.reset()
    assert slots.lengths == [0, 0, 0] and slots.get_seq_length() == 0


def test_lengths_are_copied_to_the_device_once_after_they_have_changed():
    slots = ragged()
    for change in (
        lambda: slots.commit([1, 0, 2]),
        lambda: slots.select([2, 0]),
        lambda: slots.crop(-1),
        slots.reset,
    ):
        before = slots.committed
        assert slots.committed is before
        change()
        assert slots.committed is not before and slots.committed.tolist() == slots.lengths


def test_a_recycled_cache_holds_nothing_but_has_its_buffers():
    slots = ragged()
    added = slots.add_layer(None, owner=None)
    with slots.writing(1, added={1: added}):
        slots.update(states([7], [8], [9]), states([7], [8], [9]), 1)
    buffers = [buffer for layer in slots.layers for buffer in layer.buffers]
    slots.recycle()
    assert (slots.lengths, slots.added_from, len(slots.layers)) == ([0] * 3, [0] * 3, 2)
    room = slots.layers[0].capacity
    assert slots.fits(3, room, 1)
    assert not any(slots.fits(*other) for other in ((2, room, 1), (3, room + 1, 1), (3, room, 2)))
    slots.add_layer(None, owner=None)
    now = [buffer for layer in slots.layers for buffer in layer.buffers]
    assert all(a is b for a, b in zip(now, buffers, strict=True))
    slots.add_layer(None, owner=None)
    assert not slots.layers[-1].is_initialized


def test_crop_refuses_what_a_cache_of_transformers_refuses():
    """A positive number once meant the length to keep."""
    with pytest.raises(ValueError):
        ragged().crop(1)


# Caches of transformers

CONFIGS = {
    "full": LlamaConfig(num_hidden_layers=2),
    "sliding": MistralConfig(num_hidden_layers=2, sliding_window=4),
}


def filled(config, width):
    """A DynamicCache that has seen `width` tokens, one after the other."""
    cache = DynamicCache(config=config)
    for token in range(width):
        for layer in range(2):
            cache.update(states([token]), -states([token]), layer)
    return cache


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("width", [1, 3, 4, 5, 9])
def test_a_dynamic_cache_is_loaded_to_its_positions(kind, width):
    window = 4 if kind == "sliding" else None
    slots = SlotCache([window] * 2, 1)
    load_cache(slots, filled(CONFIGS[kind], width))
    assert slots.lengths == [width]
    for keys, values in take_row(slots, 0):
        # A sliding cache has dropped what no later token can see.
        first = max(0, width - 3) if window else 0
        assert keys[0, first:, 0].tolist() == list(range(first, width))
        assert torch.equal(values, -keys)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("known", "width"), [(0, 3), (0, 9), (3, 4), (3, 9), (5, 6), (6, 12)])
def test_what_is_stored_is_what_plain_decoding_would_hold(kind, known, width):
    slots = SlotCache([4 if kind == "sliding" else None] * 2, 1)
    cache = filled(CONFIGS[kind], known)
    if known:
        load_cache(slots, cache)
    put(slots, list(range(known, width)))
    slots.commit([width - known])
    store_cache(slots, cache, known)
    plain = filled(CONFIGS[kind], width)
    assert cache.get_seq_length() == width
    for layer, expected in zip(cache.layers, plain.layers, strict=True):
        held = min(layer.keys.shape[2], expected.keys.shape[2])
        assert torch.equal(layer.keys[:, :, -held:], expected.keys[:, :, -held:])
        assert held >= min(width, 3 if kind == "sliding" else width)
        assert layer.get_mask_sizes(1) == expected.get_mask_sizes(1)


# In use: the invariants of every round


@pytest.mark.matrix
@pytest.mark.parametrize("lengths", [(1,), (7,), (3, 8, 1)], ids=str)
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("agreement", ["seldom", "sometimes", "always"])
def test_nothing_is_computed_twice_and_every_layer_holds_its_tokens(watch, agreement, k, lengths):
    target = tiny_llama(agreement)
    spec = SelfSpecModel(target)
    ledger = watch(spec)
    ids, mask = prompt(*lengths)
    draft = DraftConfig(exit_layer=EXIT, num_draft_tokens=k)
    equal_to_generate(spec, ids, mask, max_new_tokens=13, draft=draft)
    assert ledger.rounds == max(map(len, spec.last_trace.rows)) - 1


@pytest.mark.parametrize("schedule", ["fixed", "confidence"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_the_invariants_hold_when_sampling_and_for_every_schedule(watch, schedule, do_sample):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    ledger = watch(spec)
    ids, mask = prompt(3, 8, 1)
    draft = DraftConfig(exit_layer=EXIT, num_draft_tokens=5, schedule=schedule)
    spec.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=16,
        do_sample=do_sample,
        eos_token_id=[5, 9],
        draft=draft,
        generator=torch.Generator().manual_seed(0),
    )
    assert ledger.rounds == max(map(len, spec.last_trace.rows)) - 1


@pytest.mark.parametrize("exit_layer", [1, 3])
def test_the_invariants_hold_at_every_exit_and_without_luck(watch, exit_layer):
    spec = contrary(tiny_llama("sometimes"), exit_layer)
    ledger = watch(spec)
    ids, mask = prompt(3, 8)
    spec.generate(ids, attention_mask=mask, max_new_tokens=6)
    assert ledger.rounds == 5 and spec.last_stats.accepted == 0


def test_the_invariants_hold_without_drafts_and_with_a_chunked_prompt(watch):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    ledger = watch(spec)
    ids, mask = prompt(3, 8)
    options = {"max_new_tokens": 6, "prefill_chunk_size": 3}
    spec.generate(ids, attention_mask=mask, draft="none", **options)
    assert ledger.rounds == 5


# The interface of transformers' caches

MOVES = {
    "batch_repeat_interleave": [(2, [0, 0, 1, 1, 2, 2]), (1, [0, 1, 2])],
    "batch_select_indices": [
        (torch.tensor([2]), [2]),
        (torch.tensor([2, 0, 2]), [2, 0, 2]),
        (torch.tensor([True, False, True]), [0, 2]),
        ([1, -1], [1, 2]),
    ],
    "reorder_cache": [(torch.tensor([2, 0, 1]), [2, 0, 1]), (torch.tensor([1, 1, 1]), [1, 1, 1])],
}
READS = {
    *("get_seq_length", "get_max_length", "get_mask_sizes", "get_query_offset"),
    *("has_previous_state", "is_recording_past", "reset", "crop"),
    "get_max_cache_shape",  # before transformers 5.20, and inherited
}
REFUSES = {
    *("update", "prefetch", "offload", "early_initialization", "activate_past_recording"),
    *("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"),
    "update_indexer",
}


def test_every_method_of_transformers_caches_is_known():
    """A new one has to be sorted: it works, or it says what to do."""
    methods = {name for name, _ in inspect.getmembers(Cache, inspect.isfunction)}
    assert {name for name in methods if name[0] != "_"} <= {*MOVES, *READS, *REFUSES}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "kind"), [("mistral", "auto"), ("llama", "int8"), ("falcon_h1", "auto")]
)
@pytest.mark.parametrize(
    ("method", "argument", "rows"),
    [(name, *case) for name, cases in MOVES.items() for case in cases],
    ids=str,
)
def test_texts_go_on_from_rows_that_were_moved(method, argument, rows, family, kind):
    model = model_of(family, CASES_BY_FAMILY.get(family, "sdpa"))
    spec = SelfSpecModel(model, kv_cache_dtype=kind)
    ids, mask = prompt(9, 4, 12, vocab=61)
    options = {"max_new_tokens": 4, "do_sample": False, "draft": "early_exit"}
    out = spec.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
    cache = out.past_key_values
    getattr(cache, method)(argument)
    assert cache.batch_size == cache.rows == len(rows)
    text, mask = out.sequences[rows], pad(mask, (0, 4), value=1)[rows]
    expected = spec.generate(text, attention_mask=mask, **options)
    again = spec.generate(text, attention_mask=mask, past_key_values=cache, **options)
    assert torch.equal(again, expected)
    assert cache.lengths == [n + 7 for n in torch.tensor([9, 4, 12])[rows].tolist()]


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_what_a_cache_cannot_do_it_refuses_by_name_and_reads_are_answered(family):
    model = model_of(family, CASES_BY_FAMILY.get(family, "sdpa"))
    ids, mask = prompt(6, 4, vocab=61)
    out = SelfSpecModel(model).generate(
        ids, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True, do_sample=False
    )
    cache, recurrent = out.past_key_values, family == "falcon_h1"
    for name in REFUSES:
        states = (torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), 0)
        given = states if name == "update" else (0,)
        with pytest.raises((ValueError, RuntimeError), match="a SlotCache is written by"):
            getattr(cache, name)(*given)
    assert (cache.get_seq_length(), cache.get_max_length(), len(cache)) == (
        8,
        -1,
        len(cache.layers),
    )
    assert cache.get_mask_sizes(2, 0) == (10, 0) and cache.get_query_offset() == 8
    assert not cache.is_compileable
    if hasattr(Cache, "is_recording_past"):  # since transformers 5.21
        assert not cache.is_recording_past(0)
    assert cache.is_croppable is not recurrent
    if recurrent:
        assert cache.has_previous_state() and cache.has_previous_state(0)
    else:
        with pytest.raises(ValueError, match="no recurrent state"):
            cache.has_previous_state()
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == 2
