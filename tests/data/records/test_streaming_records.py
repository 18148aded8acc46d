"""Records of several arrays: what a batch has, streamed and in memory, lane by lane, and after a resume."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import paragan as pg
from fake_records import noise, wav_bytes, with_rate, write_recordings
from paragan.config.resolve import make_spec
from paragan.config.sections import DataOptions
from paragan.core.errors import RunError, UsageError
from paragan.core.types import Batch
from paragan.data.dataset import Dataset, load_data
from paragan.data.lanes import LaneLoader
from paragan.data.loader.prefetch import PrefetchOptions
from paragan.data.records.decoder import RecordOptions
from paragan.data.records.streaming_records import StreamingRecords

SEGMENTS = RecordOptions(segment=256, transform="fake_records:frames")


def load(path, options: RecordOptions = SEGMENTS, cache="memory", **others) -> Dataset:
    return load_data(str(path), resolution=None, cache=cache, records=options, **others)


def batches(dataset: Dataset, count: int = 5, start: int = 0, lanes=(0, 1), **options) -> list[Batch]:
    loader = LaneLoader(
        dataset.images, dataset.labels, local_lanes=lanes, num_lanes=2, batch_size=8, seed=7, start=start, **options
    )
    try:
        return [batch for _ in range(count) for batch in loader.next_micro_batches()]
    finally:
        loader.close()


def assert_equal(a: list[Batch], b: list[Batch]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.fields.keys() == y.fields.keys()
        assert all(torch.equal(x.fields[name], y.fields[name]) for name in x.fields)
        assert torch.equal(x.images, y.images)
        assert (x.labels is None) == (y.labels is None)


def test_waves_have_the_rate_of_their_files(tmp_path):
    recordings = write_recordings(tmp_path / "a", rate=11025)
    data = load(recordings, dataclasses.replace(SEGMENTS, label_pattern=r"^(\d)_"))
    assert data.sample_rate == data.only_class(0).sample_rate == make_spec(DataOptions(), data).sample_rate == 11025
    assert data.images.blank().sample_rate == 11025
    assert load(recordings, dataclasses.replace(SEGMENTS, field="energy")).sample_rate == 0
    assert load(recordings, dataclasses.replace(SEGMENTS, sample_rate=8000, resample=True)).sample_rate == 8000
    assert pg.from_arrays({"wave": data.images[:4]}).sample_rate == 0


def test_a_batch_has_all_fields_as_float32(tmp_path):
    data = load(write_recordings(tmp_path / "a"))
    (batch, *_) = batches(data)
    assert {name: (*x.shape[1:],) for name, x in batch.fields.items()} == dict(data.fields)
    assert data.fields == {"wave": (1, 256), "noisy": (1, 256), "energy": (16,)}
    assert all(x.dtype == torch.float32 for x in batch.fields.values())
    assert torch.equal(batch.images, batch.fields["wave"])
    energy = batch.images.square().reshape(8, 16, 16).mean(2)
    torch.testing.assert_close(batch.fields["energy"], energy, rtol=2e-3, atol=0)
    assert data.shape == (1, 256)
    assert data.is_array


@pytest.mark.parametrize("worker_type", ["threads", "processes"])
def test_streamed_records_are_those_in_memory(tmp_path, worker_type):
    folder = write_recordings(tmp_path / "a")
    memory, stream = load(folder), load(folder, cache="stream")
    assert memory.in_memory
    assert not stream.in_memory
    assert memory.fingerprint == stream.fingerprint
    prefetch = PrefetchOptions(worker_type=worker_type, workers=2)
    assert_equal(batches(memory), batches(stream, prefetch=prefetch))


def test_merged_lanes_are_the_lanes_alone(tmp_path):
    data = load(write_recordings(tmp_path / "a"), cache="stream")
    merged = batches(data)
    for lane in (0, 1):
        rows = slice(4 * lane, 4 * lane + 4)
        alone = batches(data, lanes=(lane,))
        for x, y in zip(merged, alone):
            assert all(torch.equal(x.fields[name][rows], y.fields[name]) for name in x.fields)


def test_a_resume_continues_exactly(tmp_path):
    data = load(write_recordings(tmp_path / "a"), cache="stream")
    assert_equal(batches(data)[2:], batches(data, count=3, start=16))


def test_segments_differ_between_epochs_and_cover_a_record(tmp_path):
    (tmp_path / "one.wav").write_bytes(wav_bytes(np.arange(1, 501, dtype=np.int16)))
    data = load(tmp_path, RecordOptions(segment=100))
    starts = torch.cat([batch.images[:, 0, 0] for batch in batches(data, 60)]).mul(32768).int()
    assert len(starts.unique()) > 200
    assert 1 <= int(starts.min()) < 20
    assert 381 < int(starts.max()) <= 401


def test_short_records_are_padded_with_zeros(tmp_path):
    (tmp_path / "one.wav").write_bytes(wav_bytes(noise(60)))
    (batch, *_) = batches(load(tmp_path, RecordOptions(segment=100)))
    assert torch.equal(batch.images[0, 0, :60], torch.from_numpy(noise(60) / np.float32(32768)))
    assert not batch.images[:, :, 60:].any()


def test_aligned_fields_are_cut_at_the_same_frames():
    x = np.arange(20 * 640, dtype=np.float32).reshape(20, 640)
    arrays = {"wave": x, "mel": x[:, None, ::16].astype(np.float16) // 16, "text": np.ones((20, 3), np.float32)}
    dataset = pg.from_arrays({k: v[:10] for k, v in arrays.items()})
    images = dataset.images
    assert isinstance(images, StreamingRecords)
    options = RecordOptions(segment=64, aligned=(("mel", 16),))
    from paragan.data.bad_samples import BadSamples
    from paragan.data.records.streaming_records import open_records

    records = open_records(images.source, BadSamples(None, 10, str, 0.1), options)
    (batch, *_) = batches(dataclasses.replace(dataset, images=records))
    assert batch.fields["mel"].shape == (8, 1, 4)
    assert batch.fields["text"].shape == (8, 3)
    first = batch.fields["wave"].reshape(8, 1, 4, 16)[..., 0]
    torch.testing.assert_close(batch.fields["mel"], first // 16, rtol=1e-3, atol=0)


def test_types_are_kept_until_the_device():
    arrays = {
        "image": np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3),
        "latent": np.linspace(-1, 1, 12, dtype=np.float16).reshape(2, 6),
        "wave": np.array([[-32768, 16384], [32767, 0]], np.int16),
        "caption": np.linspace(0, 1, 4, dtype=np.float64).reshape(2, 2),
    }
    data = pg.from_arrays(arrays, np.array([0, 1]), field="image")
    assert isinstance(data.images, StreamingRecords)
    assert data.images.layout.nbytes == 48 + 16 + 16 + 16
    assert data.fields["image"] == (3, 4, 4)
    assert not data.is_array
    (batch, *_) = batches(data)
    rows = data.images.source_index(np.array([0]))
    assert rows.tolist() == [0]
    for row, label in enumerate(batch.labels.tolist()):
        torch.testing.assert_close(batch.fields["latent"][row], torch.from_numpy(arrays["latent"][label]).float())
        assert torch.equal(batch.fields["wave"][row], torch.from_numpy(arrays["wave"][label]) / 32768)
        pixels = torch.from_numpy(arrays["image"][label]).permute(2, 0, 1)
        assert torch.equal(batch.images[row], pixels.float().div(127.5).sub(1))


@pytest.mark.parametrize("cache", ["memory", "stream"])
def test_damaged_audio_is_replaced_by_its_class_and_counted(tmp_path, cache):
    folder = write_recordings(tmp_path / "a", 30)
    good = wav_bytes(noise(400))
    bad = {
        "0_a.wav": (wav_bytes(np.zeros(500, np.int16)), "is silent"),
        "1_b.wav": (wav_bytes(noise(0)), "length is zero"),
        "2_c.wav": (good[:300], "is truncated: it holds 128 of 400 samples"),
        "2_d.wav": (b"", "is empty"),
        "0_e.wav": (wav_bytes(noise(500), 16000), "its sample rate is 16000 Hz, not 8000 Hz"),
        "0_f.wav": (wav_bytes(noise(500).reshape(-1, 2)), "it has 2 channels, not 1"),
        "1_g.wav": (good[:20], "is truncated: its header"),
    }
    expected = batches(load(folder, RecordOptions(segment=64, label_pattern=r"^(\d)_")), 1)
    assert len(expected) == 1
    for name, (content, _) in bad.items():
        (folder / name).write_bytes(content)
    options = RecordOptions(segment=64, label_pattern=r"^(\d)_", sample_rate=8000)
    with pytest.raises(UsageError, match="16000 Hz, not 8000 Hz"):
        load(folder, options, cache, max_bad_fraction=0.5)
    (folder / "0_e.wav").unlink()
    data = load(folder, options, cache, max_bad_fraction=0.5)
    seen = batches(data, 10)
    assert all(batch.images.isfinite().all() and batch.images.flatten(1).any(1).all() for batch in seen)
    assert data.bad_samples is not None
    lines = data.bad_samples.to_lines()
    assert len(lines) == 6
    for name, (_, reason) in bad.items():
        assert name == "0_e.wav" or any(name in line and reason in line for line in lines)
    with pytest.raises((UsageError, RunError), match=r"cannot be decoded: .* allow more with --data\.max_bad_fraction"):
        batches(load(folder, options, cache), 10)


def test_all_records_agree_with_those_in_memory_where_some_are_bad(tmp_path):
    folder = write_recordings(tmp_path / "a", 30)
    (folder / "1_1.wav").write_bytes(b"RIFF")
    memory, stream = (load(folder, cache=cache, max_bad_fraction=0.1) for cache in ("memory", "stream"))
    assert_equal(batches(memory, 8), batches(stream, 8))


def test_values_that_are_not_finite_are_bad():
    x = np.ones((10, 1, 8), np.float32)
    x[3, 0, 2] = np.nan
    data = pg.from_arrays({"wave": x})
    with pytest.raises(RunError, match="record 3 cannot be decoded: 1 of 8 values of wave are NaN or infinite"):
        batches(data, 3)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("failing", "raised ValueError: too low"),
        ("exiting", "raised SystemExit: 3"),
        ("growing", "of what it returned, it has wave"),
    ],
)
@pytest.mark.parametrize("worker_type", ["threads", "processes"])
def test_a_transform_that_fails_is_named_with_the_record(tmp_path, name, reason, worker_type):
    for number in range(8):
        samples = np.full(64, 20000 if number < 6 else 100, np.int16)
        (tmp_path / f"{number}.wav").write_bytes(wav_bytes(samples))
    data = load(tmp_path, RecordOptions(transform=f"fake_records:{name}"), "stream")
    prefetch = PrefetchOptions(worker_type=worker_type, workers=1)
    with pytest.raises(RunError, match=rf"data.transform=fake_records:{name}: {reason}.*; the record is .*wav"):
        batches(data, 4, prefetch=prefetch)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("empty", "an empty dict"),
        ("list_values", "wave as list"),
        ("numbered", "the key 1"),
        ("listing", "list"),
    ],
)
def test_what_a_transform_returns_is_described(tmp_path, name, problem):
    folder = write_recordings(tmp_path / "a", 3)
    with pytest.raises(UsageError, match=rf"fake_records:{name}: returned {problem}\. Return .*; the record is .*wav"):
        load(folder, RecordOptions(segment=64, transform=f"fake_records:{name}"))


@pytest.mark.parametrize("options", [RecordOptions(), RecordOptions(segment=16)], ids=["whole", "segment"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int16])
@pytest.mark.parametrize("container", ["files", "mapped", "npz"])
@pytest.mark.parametrize("cache", ["memory", "stream"])
def test_a_transform_may_change_its_arrays(tmp_path, options, dtype, container, cache):
    x = np.tile(np.arange(1, 17, dtype=np.float32), 2).reshape(1, 1, 32).repeat(4, 0).astype(dtype)
    if container == "files":
        for row, wave in enumerate(x):
            np.savez(tmp_path / f"{row}.npz", wave=wave)
    elif container == "mapped":
        np.save(tmp_path / "wave.npy", x)
    else:
        np.savez(tmp_path / "a.npz", wave=x)
    path = tmp_path / "a.npz" if container == "npz" else tmp_path
    plain = load(path, options, cache).images[:]
    data = load(path, dataclasses.replace(options, transform="fake_records:halving"), cache)
    for _ in range(3):
        assert np.array_equal(data.images[:], plain / 2)


def test_a_type_other_than_that_of_the_first_record_is_named_with_a_remedy(tmp_path):
    for row in range(6):
        np.savez(tmp_path / f"{row}.npz", wave=np.ones((1, 8), np.float16 if row == 5 else np.float32))
    message = (
        r"5\.npz cannot be decoded: it has wave \[1, 8\] float16, and the first record has \[1, 8\] float32: "
        r"save all as one type, or convert them with --data\.transform"
    )
    with pytest.raises(UsageError, match=message):
        load(tmp_path, RecordOptions())
    assert len(load(tmp_path, RecordOptions(transform="fake_records:as_float32")).images) == 6


def test_an_npz_without_arrays_is_described(tmp_path):
    for row in range(3):
        np.savez(tmp_path / f"{row}.npz", **({"wave": np.ones((1, 8), np.float32)} if row else {}))
    with pytest.raises(UsageError, match=r"0\.npz cannot be decoded: is an npz without arrays"):
        load(tmp_path, RecordOptions())


@pytest.mark.parametrize("cache", ["memory", "stream"])
@pytest.mark.parametrize("rate", [0, 1, 2**32 - 1])
def test_a_header_with_an_impossible_rate_is_bad(tmp_path, cache, rate):
    folder = write_recordings(tmp_path / "a")
    bad = folder / "0_x.wav"
    bad.write_bytes(with_rate(wav_bytes(noise(40_000)), rate))
    options = RecordOptions(segment=64, sample_rate=8000, resample=True)
    with pytest.raises((UsageError, RunError), match=r"0_x\.wav cannot be decoded: claims "):
        load(folder, options, cache).images[:]
    data = load(folder, options, cache, max_bad_fraction=0.5)
    assert data.images[:].shape == (13, 1, 64)
    assert data.bad_samples is not None
    assert len(data.bad_samples.reasons) == 1


def test_files_that_all_have_an_impossible_rate_are_bad(tmp_path):
    for row in range(3):
        (tmp_path / f"{row}.wav").write_bytes(with_rate(wav_bytes(noise(400)), 0))
    for rate in (0, 8000):
        with pytest.raises(UsageError, match="cannot be decoded: claims a sample rate of 0 Hz, expected 1 to 1,0"):
            load(tmp_path, RecordOptions(segment=64, sample_rate=rate, resample=rate > 0))


def test_the_fingerprint_is_of_files_and_options(tmp_path):
    folder = write_recordings(tmp_path / "a")
    plain = RecordOptions(segment=64)
    prints = [load(folder, options).fingerprint for options in (plain, plain, RecordOptions(segment=32), SEGMENTS)]
    (folder / "0_0.wav").write_bytes(wav_bytes(noise(333)))
    prints.append(load(folder, plain).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_evaluation_reads_a_record_alike_each_time(tmp_path):
    data = load(write_recordings(tmp_path / "a"), cache="stream")
    again = data.images[np.array([3, 1])]
    assert again.dtype == np.float32
    assert np.array_equal(again, np.stack([data.images[3], data.images[1]]))
    assert np.array_equal(again, data.images.subset(np.array([3, 1]))[:])


def test_memory_ahead_stays_below_its_limit(tmp_path):
    data = load(write_recordings(tmp_path / "a", 40), RecordOptions(segment=50_000), "stream")
    limit = PrefetchOptions(memory_gb=0.006, workers=2)
    loader = LaneLoader(data.images, None, local_lanes=(0,), num_lanes=1, batch_size=8, seed=0, prefetch=limit)
    for _ in range(12):
        loader.next_micro_batches()
    assert loader.pipeline
    assert 0 < loader.pipeline.memory_budget.peak_bytes <= 0.006 * 2**30
    loader.close()


def test_only_one_class(tmp_path):
    folder = write_recordings(tmp_path / "a")
    data = load(folder, RecordOptions(segment=64, label_pattern=r"^(\d)_"), "stream").only_class(1)
    names = {data.bad_samples.sample_name(int(i)) for i in data.images.source_index(np.arange(len(data.images)))}
    assert len(names) == 4
    assert all("/1_" in name for name in names)
