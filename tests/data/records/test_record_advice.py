"""Advice on records of several arrays: followed, it leads to data that are read."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import paragan as pg
from advice import advises
from fake_datasets import encode_image, random_images
from fake_records import noise, wav_bytes, with_rate, write_recordings
from paragan.config.resolve import record_options, resolve
from paragan.config.sections import DataOptions
from paragan.core.errors import RunError, UsageError
from paragan.data.dataset import Dataset, load_data
from paragan.data.formats.record_files import FolderFiles, open_record_files
from paragan.data.formats.record_source import RecordSelection
from paragan.data.records.decoder import RecordOptions
from paragan.train.image_set import open_image_set
from processes import call_command, run_cli
from tiny_run import make_run

WAVE = np.random.default_rng(0).normal(size=(6, 1, 64)).astype(np.float32)
MEL = np.ones((6, 2, 4), np.float32)


def load(path: Path, cache="memory", labels=True, value_range="auto", **options) -> Dataset:
    records = RecordOptions(**options)
    return load_data(str(path), resolution=None, cache=cache, labels=labels, value_range=value_range, records=records)


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    return write_recordings(tmp_path / "recordings", 6)


def test_the_judged_field_is_named_as_advised():
    arrays = {"a": WAVE, "b": MEL}
    with advises(
        "data: the records have several fields: a, b. Name the one that D judges: --data.field=a, in Python field='a'"
    ):
        pg.from_arrays(arrays)
    with advises("data.field=c: the records have no such field. Use one of a, b"):
        pg.from_arrays(arrays, field="c")
    assert pg.from_arrays(arrays, field="a").main_field == "a"
    with advises("from_arrays: field, segment and transform are of several arrays. Use x={name: array}"):
        pg.from_arrays(WAVE, segment=8)
    assert pg.from_arrays({"x": WAVE}, segment=8).shape == (1, 8)


def test_types_are_converted_as_advised(tmp_path):
    arrays = {"wave": WAVE, "phase": np.ones((6, 4), np.int64)}
    with advises(
        "data: field phase [4] int64 cannot be trained on. Use float32, float16 or int16, uint8 for images [H, W, C], "
        "or convert phase with --data.transform"
    ):
        pg.from_arrays(arrays)
    assert pg.from_arrays(arrays | {"phase": np.ones((6, 4), np.float16)}).fields["phase"] == (4,)
    assert pg.from_arrays(arrays, transform="test_record_advice_code:convert").fields["phase"] == (4,)


@pytest.fixture(autouse=True)
def code(tmp_path_factory, monkeypatch) -> None:
    """A module of the user's own."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "test_record_advice_code.py").write_text(
        "import numpy as np\n\nVALUE = 1\n\n"
        "def convert(record, rng):\n    return {name: x.astype(np.float32) for name, x in record.items()}\n"
    )
    monkeypatch.syspath_prepend(folder)


def test_empty_fields_and_other_lengths_are_corrected_as_advised():
    with advises("data: field note [0] float32 holds nothing. Leave note out of the files, or fill it"):
        pg.from_arrays({"wave": WAVE, "note": np.zeros((6, 0), np.float32)})
    with advises(
        "data: the arrays: wave is [6, 1, 64] and mel is [5, 2, 4]: the first axis counts records. Give all fields the "
        "same"
    ):
        pg.from_arrays({"wave": WAVE, "mel": MEL[:5]})
    with advises("data: the arrays: wave is [0, 1, 64], no record. Give at least one"):
        pg.from_arrays({"wave": WAVE[:0]})
    with advises("data: the arrays holds no arrays. Give at least one, [N, ...]"):
        pg.from_arrays({})
    assert len(pg.from_arrays({"wave": WAVE, "mel": MEL}).images) == 6


def test_transforms_are_corrected_as_advised(recordings):
    with advises("data.transform=fake_records:nowhere: "):
        load(recordings, transform="fake_records:nowhere")
    with advises("Use module:function, and start in the folder of the module"):
        load(recordings, transform="fake_records:nowhere")
    with advises("data.transform=fake_records:RATE: is not a function. Use module:function"):
        load(recordings, transform="fake_records:RATE")
    with advises("returned list. Return a dict of NumPy arrays by name"):
        load(recordings, segment=64, transform="fake_records:listing")
    assert load(recordings, segment=64, transform="fake_records:frames").fields["energy"] == (4,)


def test_segments_are_corrected_as_advised():
    with advises("data.aligned: cuts fields with a segment, and there is none. Use --data.segment=N"):
        RecordOptions(aligned=(("mel", 16),)).check()
    with advises("data.segment=40: must be a multiple of 16, so that aligned fields have whole frames. Use 48"):
        RecordOptions(segment=40, aligned=(("mel", 16),)).check()
    RecordOptions(segment=48, aligned=(("mel", 16),)).check()
    with advises(
        "data.aligned: fields have a common frame at every 999,983,000,000 samples only. Use numbers of samples of "
        "which 16,777,216 or less is a multiple"
    ):
        RecordOptions(segment=999_983_000_000, aligned=(("mel", 999_983), ("energy", 1_000_000))).check()
    RecordOptions(segment=1_000_000, aligned=(("mel", 500_000), ("energy", 1_000_000))).check()
    with advises("data.aligned=mel: is not FIELD:SAMPLES. Use one such as mel:256"):
        record_options(DataOptions(aligned=("mel",)))
    assert record_options(DataOptions(aligned=("mel:256",))).aligned == (("mel", 256),)


def test_lengths_and_rates_are_limited_as_advised(recordings):
    with advises("data.segment=1000000000000: is more than 16,777,216 samples. Use --data.segment=16777216 or less"):
        load(recordings, segment=10**12)
    assert load(recordings, segment=2**24).images[0].shape == (1, 2**24)
    with advises("data.segment=20000000: is more than 16,777,216 samples. Use --data.segment=16777200 or less"):
        RecordOptions(segment=20_000_000, aligned=(("mel", 240),)).check()
    with advises("data.sample_rate=4294967295: is more than 1,000,000 Hz. Use --data.sample_rate=1000000 or less"):
        load(recordings, segment=64, sample_rate=2**32 - 1, resample=True)
    assert load(recordings, segment=64, sample_rate=10**6, resample=True).sample_rate == 10**6


def test_the_judged_field_is_not_aligned_as_advised(tmp_path):
    for row in range(3):
        np.savez(tmp_path / f"{row}.npz", wave=WAVE[row], mel=MEL[row])
    with advises("data.aligned=wave:64: is the field that segments are cut from. Leave it out"):
        load(tmp_path, segment=64, aligned=(("wave", 64), ("mel", 16)))
    assert load(tmp_path, segment=64, aligned=(("mel", 16),)).fields["mel"] == (2, 4)


def test_rates_are_chosen_as_advised(recordings, tmp_path):
    with advises("data.resample=true: to which rate? Use --data.sample_rate=HZ"):
        load(recordings, segment=64, resample=True)
    (recordings / "9_9.wav").write_bytes(wav_bytes(noise(900), 16000))
    with advises(
        f"data.sample_rate=auto: {recordings}/9_9.wav has 16000 Hz, not 8000 Hz. Use --data.sample_rate=8000 "
        "--data.resample=true"
    ):
        load(recordings, segment=64)
    assert load(recordings, segment=64, sample_rate=8000, resample=True).images[6].shape == (1, 64)
    np.savez(tmp_path / "a.npz", wave=WAVE)
    with advises(f"data.sample_rate=8000: {tmp_path}/a.npz holds no audio files. Leave it out"):
        load(tmp_path / "a.npz", sample_rate=8000)
    assert load(tmp_path / "a.npz").shape == (1, 64)


def test_labels_of_files_are_chosen_as_advised(recordings):
    with advises("data.label_key=speaker: files of records have no keys. Use --data.label_pattern"):
        load(recordings, labels="speaker", segment=64)
    with advises("data.label_pattern=^\\d_: has no group. Put the class in parentheses: ^(\\d+)_"):
        load(recordings, label_pattern=r"^\d_", segment=64)
    with advises("data.label_pattern=^(\\d: "):
        load(recordings, label_pattern=r"^(\d", segment=64)
    with advises("Use one such as ^(\\d+)_"):
        load(recordings, label_pattern=r"^(\d", segment=64)
    assert load(recordings, label_pattern=r"^(\d+)_", segment=64).classes == ("0", "1", "2")
    (recordings / "cat.wav").write_bytes(wav_bytes(noise(100)))
    with advises(
        f"data.label_pattern=^(\\d+)_: does not match {recordings}/cat.wav. Use a pattern that all names match, or "
        "--data.labels=false"
    ):
        load(recordings, label_pattern=r"^(\d+)_", segment=64)
    assert load(recordings, label_pattern=r"^([^_.]+)", segment=64).classes == ("0", "1", "2", "cat")
    assert load(recordings, label_pattern=r"^(\d+)_", segment=64, labels=False).labels is None


def test_files_are_named_as_advised(recordings):
    (recordings / "0_0.flac").write_bytes(wav_bytes(noise(100)))
    with advises(
        f"data: {recordings}/0_0.wav and 0_0.flac are one field of one record. Give them different names before the "
        "first dot"
    ):
        load(recordings, segment=64)
    shutil.move(recordings / "0_0.flac", recordings / "0_00.flac")
    assert len(load(recordings, segment=64).images) == 7
    with advises(f"data: {recordings}/0_0.wav is one audio file. Give its folder, {recordings}"):
        load(recordings / "0_0.wav")


def test_options_of_other_data_are_left_out_as_advised(recordings, tmp_path):
    with advises(
        "data.segment: is for records of named arrays and for audio, and digits holds others: digits, image 0. Use "
        "--data.segment=0, or --data with such records alone"
    ):
        load(Path("digits"), segment=64)
    assert load(Path("digits"), segment=0).fields == {}
    stray = recordings / "cover.png"
    stray.write_bytes(encode_image(random_images(1)[0]))
    with advises(f"{recordings} holds others: {stray}. Use --data.segment=0, or --data with such records alone"):
        load(recordings, segment=64)
    stray.unlink()
    with advises("data.range=full: is for images, and the data are records. Leave it out"):
        load(recordings, segment=64, value_range="full")
    dataset = load(recordings, segment=64)
    run = make_run()
    with advises("--mirror: flips images, and the data are records of several arrays. Use --data.transform"):
        resolve(dataclasses.replace(run, data=dataclasses.replace(run.data, mirror=True)), dataset)


def test_hdf5_without_other_types_is_read_as_advised(tmp_path):
    import h5py

    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["wave"] = WAVE
        file["text"] = np.array([b"a"] * 6)
    with advises(f"data: {path}: text is |S1, expected numbers [N, ...]. Leave it out"):
        load(path)
    with h5py.File(path, "a") as file:
        del file["text"]
    assert load(path).shape == (1, 64)


def test_mapped_arrays_are_copied_as_advised(tmp_path):
    np.save(tmp_path / "wave.npy", WAVE)
    remote = SimpleNamespace(local_root=None, location="http://host/a", is_remote=True)
    with advises("data: http://host/a: arrays of all records are mapped. Copy them to this machine"):
        open_record_files(FolderFiles(cast(Any, remote), {"wave.npy": None}), True, RecordSelection())
    assert load(tmp_path).shape == (1, 64)


def test_a_transform_returns_equal_shapes_as_advised(tmp_path):
    recordings = write_recordings(tmp_path / "recordings", 6)
    with advises("Return equal shapes and types", RunError):
        load(recordings, transform="fake_records:growing").images[:]
    assert load(recordings, segment=64, transform="fake_records:frames").images[:].shape == (6, 1, 64)


def test_records_are_scored_as_arrays_as_advised(recordings, tmp_path):
    with advises(f"reals: {recordings} holds records of several arrays. Save one as `x` of an .npz", UsageError):
        open_image_set("reals", str(recordings), with_labels=False)
    np.savez(tmp_path / "x.npz", x=WAVE)
    assert open_image_set("reals", str(tmp_path / "x.npz"), with_labels=False).is_array
    assert open_image_set("reals", load(recordings, segment=64), with_labels=False).is_array


def test_records_are_inspected_as_advised(recordings, tmp_path):
    (recordings / "2_9.wav").write_bytes(wav_bytes(np.zeros(9, np.int16)))
    (recordings / "3_9.wav").write_bytes(with_rate(wav_bytes(noise(99)), 0))
    command = ["data", "inspect", str(recordings)]
    with advises("--sheet, --json: are for images, and the data are records of several arrays. Leave them out"):
        call_command(*command, "--sheet", tmp_path / "a.png")
    result = run_cli(*command)
    assert result.status == 0
    assert "audio     6 files of 8000 Hz" in result.out
    assert "wave      int16 [1, 300] to [1, 500]" in result.out
    assert "2_9.wav: is silent: all samples are 0" in result.out
    assert "3_9.wav: claims a sample rate of 0 Hz, expected 1 to 1,000,000" in result.out
    assert run_cli("data", "convert", str(recordings), str(tmp_path / "out.npz")).status == 2
