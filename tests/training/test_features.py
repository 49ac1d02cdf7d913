"""Features on disk: a fit reads the same from them as from the target, or is told why not."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_llama
from training_tools import BLOCK, Stopped, assert_same, blocks, distance, saved

from selfspec.decoder import Decoder
from selfspec.heads import head_class
from training.data import Blocks, Mixture, collate
from training.exits import features
from training.exits.drafts import HeldOutDrafts
from training.exits.features import (
    FeaturesConfig,
    Manifest,
    open_features,
    streams_of,
    target_reader,
)
from training.exits.task import DraftLossConfig, ExitTask
from training.loop.loop import Loop, LoopConfig
from training.loop.optim import OptimizerConfig

STREAMS = [0, 2, 4]
TEXT = [blocks(seed=1), blocks(7, seed=2)]


def decoder(**shape):
    return Decoder(tiny_llama(dtype=torch.float32, **shape))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "features"


def settings(folder, dtype="float32", shard_blocks=9, streams=STREAMS):
    """Shards of a few blocks."""
    size = BLOCK * 32 * (len(streams) + 1) * (4 if dtype == "float32" else 2)
    return FeaturesConfig(
        folder=str(folder), dtype=dtype, shard_megabytes=size * shard_blocks / 1e6
    )


def cache(folder, dtype="float32", streams=STREAMS, text=TEXT, target=None, **options):
    config = settings(folder, dtype, streams=streams, **options)
    return open_features(config, target or decoder(), streams, text)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What is read


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 2**-8)])
def test_a_batch_from_files_is_what_the_target_says(folder, dtype, near):
    target = decoder()
    read, ran = cache(folder, dtype, target=target), target_reader(target, STREAMS)
    data = Mixture(TEXT, [1, 1], seed=3)
    for start in range(0, 60, 5):
        batch = data.batch(start, 5)
        found, expected = read(batch), ran(batch)
        assert found.streams.keys() == expected.streams.keys()
        pairs = [(found.normed, expected.normed)]
        pairs += [(found.streams[layer], expected.streams[layer]) for layer in STREAMS]
        for mine, theirs in pairs:
            assert mine.dtype == theirs.dtype == torch.float32
            torch.testing.assert_close(mine, theirs, rtol=near, atol=1e-5)
        assert torch.equal(found.packing.documents, expected.packing.documents)
        assert torch.equal(found.packing.positions, expected.packing.positions)


def test_the_numbers_are_those_of_the_pass_that_made_them(folder):
    """Bit for bit in float32; a pass of other blocks may round otherwise."""
    target = decoder()
    read = cache(folder, target=target, shard_blocks=8)
    batch = collate([TEXT[0][number] for number in range(8)])
    found, expected = read(batch), target_reader(target, STREAMS)(batch)
    assert torch.equal(found.normed, expected.normed)
    assert all(torch.equal(found.streams[n], expected.streams[n]) for n in STREAMS)


def test_the_same_tokens_in_other_documents_are_other_blocks(folder):
    one, other = blocks(4, seed=1), blocks(4, seed=1)
    other.documents = torch.zeros_like(other.documents)
    target = decoder()
    read, ran = cache(folder, text=[one, other], target=target), target_reader(target, STREAMS)
    assert one.documents.any()
    for batch in [each[number] for each in (one, other) for number in range(4)]:
        torch.testing.assert_close(read(batch).normed, ran(batch).normed)


def task(reader_of=None, **shape):
    """Two kinds of heads; `reader_of(decoder, streams)` makes the reader."""
    target = decoder(**shape)
    torch.manual_seed(0)
    heads = [
        head_class("lens").build(target, 2, rank=4).float(),
        head_class("fused").build(target, 2, feature_layers=[2, 3, 4]).float(),
    ]
    reader = reader_of(target, streams_of(heads)) if reader_of else None
    held_out = HeldOutDrafts(target, heads, TEXT[1], depths=2)
    return ExitTask(target, heads, DraftLossConfig(depths=2), held_out, reader)


def fit(output, reader_of=None, **shape):
    """The weights after three steps."""
    config = LoopConfig(steps=3, batch_size=4, micro_batch_size=2, precision="no")
    data = Mixture(TEXT, [2, 1], seed=0)
    optimizer = OptimizerConfig(name="adamw", lr=1e-2)
    Loop(task(reader_of, **shape), data, config, optimizer, output, {}).run()
    return {n: t for n, t in saved(output, 3).items() if n.startswith("model.")}


def gradient(fitted):
    """Of the loss of a few blocks, all weights end to end."""
    loss, _ = fitted(collate([TEXT[0][number] for number in range(9)]), 0, 0.0)
    loss.backward()
    heads = fitted.heads.parameters()
    return torch.cat([p.grad.flatten() for p in heads if p.grad is not None])


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_gradients_from_files_are_those_from_the_target(folder, dtype, near):
    ran = gradient(task())
    read = gradient(task(lambda target, streams: cache(folder, dtype, streams, target=target)))
    assert ran.norm() > 0 and (ran - read).norm() < near * ran.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fit_from_files_is_the_fit_from_the_target(folder, tmp_path, dtype):
    def reader(target, streams):
        return cache(folder, dtype, streams, target=target)

    cached = fit(tmp_path / "cached", reader)
    if dtype == "float32":
        ran, other = fit(tmp_path / "ran"), fit(tmp_path / "other", seed=1)
        assert distance(ran, cached) < 1e-4 < distance(ran, other)
    assert_same(cached, fit(tmp_path / "again", reader))


def test_a_fit_from_files_does_not_run_the_target(folder, monkeypatch):
    target = decoder()
    read = cache(folder, target=target)
    monkeypatch.setattr(features, "target_states", None)
    assert read(TEXT[0][3]).normed.shape == (1, BLOCK, 32)
    assert cache(folder, target=target)(TEXT[1][0]).normed.shape == (1, BLOCK, 32)


# Making it


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_making_goes_on_where_it_stopped_and_ends_in_the_same_files(
    folder, tmp_path, monkeypatch, lost
):
    cache(tmp_path / "whole")
    make, made = features._read_shard, []

    def failing(manifest, number, *rest):
        if number == lost:
            raise Stopped
        return make(manifest, number, *rest)

    monkeypatch.setattr(features, "_read_shard", failing)
    with pytest.raises(Stopped):
        cache(folder)
    (folder / ".features_00000.safetensors.123.tmp").write_bytes(b"left over")
    monkeypatch.setattr(
        features, "_read_shard", lambda m, n, *rest: made.append(n) or make(m, n, *rest)
    )
    cache(folder)
    assert made == [*range(lost, 4)]
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_shard_that_the_manifest_does_not_know_yet_is_made_again(folder):
    cache(folder)
    before = contents(folder)
    manifest = json.loads(before["features.json"])
    manifest["shards"].pop()
    (folder / "features.json").write_text(json.dumps(manifest))
    (folder / "features_00003.safetensors").write_bytes(b"half")
    cache(folder)
    assert contents(folder) == before


def test_the_size_is_said_before_and_is_right(folder, capsys):
    cache(folder, "bfloat16")
    size = 31 * BLOCK * 32 * 4 * 2
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("features of 31 blocks (streams [0, 2, 4] and the LM head's i")
    assert f"take {size / 1e9:.3f} GB" in said[0]
    shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(shards) == 4 and size < sum(shards) < size + 4 * 1000  # headers


def test_features_that_do_not_fit_are_not_begun(folder, monkeypatch):
    usage = shutil.disk_usage(folder.parent)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: usage._replace(free=9999))
    with pytest.raises(OSError, match=r"GB are free; give less text"):
        cache(folder)
    assert contents(folder) == {}


def test_a_full_disk_keeps_what_is_whole(folder, monkeypatch):
    save, written = features.save_file, []

    def full(tensors, path):
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        save(tensors, path)

    monkeypatch.setattr(features, "save_file", full)
    with pytest.raises(OSError, match=r"features_00002\.safetensors could not be written"):
        cache(folder)
    assert sorted(contents(folder)) == [
        "features.json",
        "features_00000.safetensors",
        "features_00001.safetensors",
    ]
    assert len(Manifest.read(folder).shards) == 2


def test_other_processes_wait_for_the_first(folder, monkeypatch):
    cache(folder)
    whole = (folder / "features.json").read_text()
    part = json.loads(whole) | {"shards": []}
    (folder / "features.json").write_text(json.dumps(part))
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            (folder / "features.json").write_text(whole)

    monkeypatch.setattr(features, "processes", lambda: SimpleNamespace(is_main_process=False))
    monkeypatch.setattr(features.time, "sleep", sleep)
    assert cache(folder)(TEXT[0][0]).normed.shape == (1, BLOCK, 32)
    assert len(waits) == 2
    with pytest.raises(ValueError, match=r"another target\.weights"):
        cache(folder, target=decoder(seed=1))


# Refused


def other_text():
    return [TEXT[0], blocks(7, seed=6)]


def cut_anew():
    return [Blocks(b.tokens, torch.zeros_like(b.documents), b.trained, BLOCK) for b in TEXT]


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"target": {"seed": 1}}, r"another target\.weights; give a new features\.folder"),
        ({"target": {"num_hidden_layers": 5}}, r"target\.num_hidden_layers \(4 there, 5 here\)"),
        ({"dtype": "bfloat16"}, r"dtype \('float32' there, 'bfloat16' here\)"),
        ({"streams": [1, 2]}, r"set of streams \(\[0, 2, 4\] there, \[1, 2\] here\)"),
        ({"text": other_text()}, r"another text of data\[1\];"),
        ({"text": cut_anew()}, r"text of data\[0\], text of data\[1\];"),
        ({"text": TEXT[:1]}, r"text of data\[1\];"),
    ],
)
def test_features_of_something_else_are_refused(folder, changes, refusal):
    cache(folder)
    before = contents(folder)
    if "target" in changes:
        changes = {**changes, "target": decoder(**changes["target"])}
    with pytest.raises(ValueError, match=refusal):
        cache(folder, **changes)
    assert contents(folder) == before


def test_a_target_in_another_dtype_is_another(folder):
    cache(folder)
    with pytest.raises(ValueError, match=r"target\.dtype \('float32' there, 'float64' here\)"):
        cache(folder, target=Decoder(tiny_llama()))


def test_fewer_streams_and_other_shards_are_served(folder):
    cache(folder)
    read = cache(folder, streams=[2], shard_blocks=2)
    assert read(TEXT[0][20]).streams.keys() == {2}


def test_a_block_of_other_text_is_named(folder):
    with pytest.raises(ValueError, match="holds a block that is not in the features"):
        cache(folder)(blocks(1, seed=8)[0])


def test_damage_is_found_before_anything_is_read(folder):
    cache(folder)
    shard = folder / "features_00001.safetensors"
    whole = shard.read_bytes()
    middle = len(whole) // 2
    for damaged in (whole[:-4], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        shard.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"features_00001\.safetensors is damaged; delete"):
            cache(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=r"features_00001\.safetensors is missing"):
        cache(folder)
    shard.write_bytes(whole)
    cache(folder)


@pytest.mark.parametrize("text", ['{"target": ', "[1]", '{"target": {}}'])
def test_a_damaged_manifest_is_named(folder, text):
    cache(folder)
    (folder / "features.json").write_text(text)
    with pytest.raises(ValueError, match=r"features\.json"):
        cache(folder)
