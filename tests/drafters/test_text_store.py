"""A store finds what brute force finds in what it still holds, and no output depends on it."""

import copy
import pickle
import random
import tracemalloc

import pytest
import torch
from conftest import EXIT, greedy, prompt, requests_equal_to_generate, tiny_llama
from distribution_tools import target as target
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from selfspec import SelfSpecModel, TextStore
from selfspec.drafters.text_store import SIZES

TOKENS = st.lists(st.integers(0, 2), max_size=30)
TEXTS = st.lists(TOKENS, max_size=6)
IDS, MASK = prompt(3, 8, 5)
NEW = 16
DRAFTS = {
    "prompt_lookup": {"drafter": "prompt_lookup"},
    "ngram": {"drafter": "prompt_lookup", "lookup": {"index": "ngram"}},
    "cascade": {"drafter": "cascade", "exit_layer": EXIT, "lookup": {"confident": 2}},
    "auto": {"drafter": "auto"},
    "early_exit": {"exit_layer": EXIT},  # reads no store, but what it writes is stored
}


@pytest.fixture(scope="module")
def model():
    return tiny_llama("sometimes")


def held_by(texts, room):
    """What a store of `room` tokens holds of texts; there is a -1 behind each."""
    kept = [[*text[-room:], -1] for text in texts if text]
    return [token for text in kept for token in text][-room:]


def brute_force(texts, room, sequence, shortest):
    """The match's length and the latest places where it ends, by comparing every place."""
    held = held_by(texts, room)
    for size in reversed(SIZES):
        if shortest <= size <= len(sequence):
            ends = [
                end
                for end in range(size, len(held) + 1)
                if held[end - size : end] == sequence[-size:]
            ]
            if ends:
                return size, [len(held) - end for end in reversed(ends)]
    return None


@settings(deadline=None)
@given(TEXTS, TOKENS, st.integers(1, 90), st.integers(1, 4))
def test_the_longest_match_is_found_in_what_is_still_held(texts, sequence, room, shortest):
    store = TextStore(room)
    for text in texts:
        store.add(text)
    assert len(store) == len(held_by(texts, room)) <= room
    found, expected = store.find(sequence, shortest), brute_force(texts, room, sequence, shortest)
    if found is None:  # other n-grams of the same hash may hide it, or nothing is there
        return
    assert expected is not None and found.length <= expected[0]
    held, first = held_by(texts, room), store._ring.start
    ends = [end - first for end in found.ends]
    for end in ends:
        assert held[end - found.length : end] == sequence[-found.length :]
    assert ends == sorted(ends, reverse=True)


@settings(deadline=None)
@given(TEXTS, TOKENS)
def test_with_room_enough_nothing_is_missed(texts, sequence):
    store = TextStore()
    for text in texts:
        store.add(text)
    found, expected = store.find(sequence, 2), brute_force(texts, 2**18, sequence, 2)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.length == expected[0]
        assert [store._ring.written - end for end in found.ends] == expected[1][:16]


def stored(*texts):
    store = TextStore(1000)
    for text in texts:
        store.add(text)
    return store


def continued(store, sequence, length=40):
    found = store.find(sequence, 2)
    return None if found is None else store.continuation(found, length)


def test_a_path_is_as_long_as_its_probability_allows():
    head = [*range(20, 36)]
    assert continued(stored([*head, *range(1, 10)]), head) == [*range(1, 10)]
    assert continued(stored([*head, *range(1, 10)]), head, length=3) == [1, 2, 3]
    often = [[*head, 1, 2, 3]] * 3 + [[*head, 1, 4, 5]]
    assert continued(stored(*often), head) == [1, 2, 3]  # 3 of 4
    assert continued(stored([*head, 1, 2], [*head, 3, 4]), head) == [3, 4]  # the later one
    seldom = [[*head, 1, last] for last in range(40, 51)]  # 11 ends, each of them 1 in 11
    assert continued(stored(*seldom), head) == [1]


def test_paths_are_no_longer_than_their_match_and_stay_in_their_text():
    text = [*range(1, 60)]
    assert continued(stored(text), [1, 2]) == [3, 4]
    assert continued(stored(text), text[:32]) == text[32:]
    assert continued(stored([1, 2, 3], [4, 5, 6]), [9, 2, 3]) == []
    assert continued(stored([1, 2, 3], [4, 5, 6]), [3, 4]) is None


def test_memory_is_the_same_after_many_evictions():
    store, source = TextStore(500), random.Random(0)
    before, texts = store.nbytes, [[source.randrange(50) for _ in range(40)] for _ in range(60)]
    assert before == 84 * 500
    tracemalloc.start()
    for text in texts * 10:
        store.add(text)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (store.nbytes, len(store)) == (before, 500)
    assert grown < 20_000
    for _ in range(2000):
        start = [source.randrange(50) for _ in range(3)]
        found = store.find(start + source.choice(texts)[:20], 2)
        assert found is None or all(token >= 0 for token in store.continuation(found, 40))


def test_a_saved_store_finds_the_same(tmp_path):
    store = stored([1, 2, 3, 4], [5, 6, 7], [], [1, 2, 8])
    file = tmp_path / "texts.safetensors"
    store.save(file)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    for loaded in (TextStore.load(file), copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert len(loaded) == len(store)
        for sequence in ([1, 2], [5, 6], [4, 5], [3, 4]):
            assert continued(loaded, sequence) == continued(store, sequence)
    small = TextStore.load(file, max_tokens=8)
    assert continued(small, [1, 2]) == [8] and continued(small, [2, 3]) is None
    TextStore().save(file)
    assert len(TextStore.load(file)) == 0


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        TextStore(0)
    with pytest.raises(TypeError, match=r"max_tokens is an integer, .* got 100000\.0"):
        TextStore(1e5)
    with pytest.raises(ValueError, match=r"list of token ids, got -1; ids are 0 or more"):
        TextStore().add([1, -1])
    file = tmp_path / "texts.safetensors"
    with pytest.raises(FileNotFoundError):
        TextStore.load(file)
    with pytest.raises(IsADirectoryError, match="is a folder; give a safetensors file"):
        TextStore.load(tmp_path)
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="cannot be read"):
        TextStore.load(file)
    for wrong in (torch.zeros(3), torch.tensor([3, -7], dtype=torch.int32)):
        save_file({"tokens": wrong}, file)
        with pytest.raises(ValueError, match="not a saved TextStore"):
            TextStore.load(file)


@pytest.mark.parametrize("text", ["a text", ["a"], [1, 2.5], IDS, torch.ones(3), 3, None])
def test_what_is_no_text_is_refused_and_leaves_nothing(text, model):
    spec = SelfSpecModel(model, store=TextStore())
    for add in (spec.remember, spec.store.add):
        with pytest.raises(TypeError, match="a text is one list of token ids, got"):
            add(text)
    assert len(spec.store) == 0


def test_a_store_is_saved_into_a_folder_that_is_not_there_yet(tmp_path):
    file = tmp_path / "some" / "folder" / "texts.safetensors"
    stored([1, 2, 3]).save(file)
    assert continued(TextStore.load(file), [1, 2]) == [3]


def test_texts_of_another_tokenizer_are_refused_before_anything_runs(model):
    spec = SelfSpecModel(model)
    with pytest.raises(ValueError, match="no store to remember texts in"):
        spec.remember([1, 2])
    with pytest.raises(TypeError, match="a store is a TextStore or the file of a saved one, got 5"):
        spec.store = 5
    spec.store = TextStore()
    for wrong in ([1, 10**6], [-1]):
        with pytest.raises(ValueError, match="remember takes one text of token ids"):
            spec.remember(wrong)
    spec.store.add([1, 10**6])
    call = {"attention_mask": MASK, "draft": "prompt_lookup", "max_new_tokens": 2}
    with pytest.raises(ValueError, match=r"token id 1000000, and the model has \d+ tokens"):
        spec.generate(IDS, **call)
    spec.store = TextStore(8)
    for text in ([10**6], [1, 2, 3, 4], [1, 2, 3, 4]):  # the later ones overwrite the first
        spec.store.add(text)
    spec.generate(IDS, **call)


def stores(text):
    """An empty store, those of right texts, of texts wrong here and there, and a tiny one."""
    wrong = text.clone()
    wrong[:, ::5] = wrong[:, ::5] % 7 + 1
    for texts, room in (([], 999), (text, 999), (wrong, 999), ([*wrong, *text], 20)):
        store = TextStore(room)
        for row in texts:
            store.add(row.tolist())
        yield store


OPTIONS = {"greedy": {"do_sample": False}, "coupled": {"do_sample": True}}


@pytest.mark.matrix
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", [slice(1, 2), slice(0, 3)], ids=["row", "batch"])
def test_a_store_never_changes_an_output(model, draft, options, rows):
    draft = {**draft, "rule": "coupled"} if options["do_sample"] else draft
    call = {"attention_mask": MASK[rows], "max_new_tokens": NEW, **options}

    def write(store):
        spec = SelfSpecModel(model, store=store)
        generator = torch.Generator().manual_seed(0) if options["do_sample"] else None
        text = spec.generate(IDS[rows], draft=draft, generator=generator, **call)
        return text, spec.last_stats

    expected, alone = write(None)
    if not options["do_sample"]:
        assert torch.equal(expected, greedy(model, IDS[rows], MASK[rows], max_new_tokens=NEW))
    rounds = []
    for store in stores(expected):
        for _ in range(2):
            text, stats = write(store)
            assert torch.equal(text, expected)
            rounds.append(stats.rounds)
        assert len(store) > 0
    if draft.get("drafter") == "prompt_lookup":
        assert rounds[1] < alone.rounds and rounds[2] < alone.rounds


@pytest.mark.matrix
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_requests_of_a_batch_find_what_others_wrote(model, draft):
    spec = SelfSpecModel(model, store=TextStore())
    prompts = [row[mask.bool()].tolist() for row, mask in zip(IDS, MASK, strict=True)] * 3
    found = requests_equal_to_generate(spec, prompts, NEW, draft=draft)
    first, *_, last = (output.trace.rows[0] for output in found.values())
    if draft.get("drafter") == "prompt_lookup":
        assert len(last) < len(first)
    assert spec.store is not None
    for ids, output in zip(prompts, found.values(), strict=True):
        assert continued(spec.store, ids + output.generated_tokens[:4], 3) is not None


def test_nothing_is_kept_between_calls_by_default(model):
    spec, rounds = SelfSpecModel(model), []
    for _ in range(2):
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, draft="prompt_lookup")
        assert spec.last_stats is not None
        rounds.append(spec.last_stats.rounds)
    assert spec.store is None and rounds[0] == rounds[1]


def test_copies_have_their_own_store_and_what_was_in_it(model):
    spec = SelfSpecModel(model, store=TextStore(1000))
    spec.remember([1, 2, 3])
    assert copy.copy(spec).store is spec.store
    for other in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert continued(other.store, [1, 2]) == [3]
        other.remember(torch.tensor([[1, 2, 4]]))
        assert (continued(other.store, [1, 2]), continued(spec.store, [1, 2])) == ([4], [3])


def test_a_file_is_a_store(model, tmp_path):
    stored([1, 2, 3]).save(tmp_path / "texts")
    store = SelfSpecModel(model, store=tmp_path / "texts").store
    assert store is not None and continued(store, [1, 2]) == [3]
