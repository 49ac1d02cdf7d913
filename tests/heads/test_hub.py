"""Heads on the hub: what is sent, and what is fetched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import greedy, prompt, tiny_llama

from selfspec import SelfSpecModel
from selfspec.heads import CARD_NAME, HEADS_CONFIG, head_class, hub

ID = "someone/some-heads"


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Path:
    """A hub with one shelf: what is pushed there can be fetched."""
    shelf = tmp_path / "shelf"

    class Api:
        def __init__(self, token=None):
            self.token = token

        def create_repo(self, repo_id, private, exist_ok):
            assert exist_ok
            return f"https://hub/{repo_id}"

        def upload_folder(self, repo_id, folder_path, commit_message):
            shutil.copytree(folder_path, shelf)

    def fetch(name, allow_patterns):
        assert name == ID
        return str(shelf)

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(hub, "snapshot_download", fetch)
    return shelf


@pytest.fixture
def spec() -> SelfSpecModel:
    model = tiny_llama("sometimes")
    decoder = SelfSpecModel(model).decoder
    heads = [head_class("block").build(decoder, 2), head_class("lens").build(decoder, 1)]
    figures = {"agreement": [0.5, 0.4], "alpha": [0.6, 0.5], "accepted_length": {"greedy": 2.0}}
    heads[0].facts = {"data": ["novels (100%)"], "held_out": {"prose": figures}}
    return SelfSpecModel(model, heads)


def test_what_is_pushed_can_be_loaded_by_its_id(shelf, spec):
    assert spec.push_to_hub(ID) == f"https://hub/{ID}"
    loaded = SelfSpecModel(spec.model, heads=ID)
    assert [(h.kind, h.exit_layer) for h in loaded.heads] == [("block", 2), ("lens", 1)]
    assert loaded.heads[0].facts == spec.heads[0].facts
    ids, mask = prompt(5)
    out = loaded.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8)
    assert out.equal(greedy(spec.model, ids, mask, max_new_tokens=8))


def test_the_card_says_what_they_are_and_what_was_measured(shelf, spec):
    spec.push_to_hub(ID)
    card = (shelf / CARD_NAME).read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: selfspec\n")
    assert f"heads='{ID}'" in card
    assert "- novels (100%)" in card
    assert "| prose | `block` | 2 | 0.50 → 0.40 | 0.60 → 0.50 | 2.00 | – |" in card
    assert not list(shelf.glob("model*"))


def test_without_heads_nothing_is_pushed(shelf):
    with pytest.raises(ValueError, match="no heads to save"):
        SelfSpecModel(tiny_llama("sometimes")).push_to_hub(ID)
    assert not shelf.exists()


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "a/b/c", Path("no/where")])
def test_what_is_neither_folder_nor_id_is_refused(name):
    with pytest.raises(FileNotFoundError, match=HEADS_CONFIG):
        hub.find_heads(name)


def test_a_file_of_heads_is_no_hub_id(shelf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / HEADS_CONFIG).touch()
    with pytest.raises(FileNotFoundError, match="is a file; give the folder that it is in"):
        hub.find_heads(f"heads/{HEADS_CONFIG}")
