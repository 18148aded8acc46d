"""Images that are not square, of more than three channels, and larger than Pillow reads unasked."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from advice import advises
from paragan.core.errors import UsageError
from paragan.core.image_shape import ImageSize
from paragan.data import decode
from paragan.data.dataset import Dataset, from_arrays, load_data
from paragan.data.loader.decode_worker import DecodeWorker
from paragan.data.loader.prefetch import BatchIndices, PrefetchPipeline
from paragan.data.loader.shared_memory import SharedArena
from paragan.data.open_source import open_source
from paragan.data.streaming import StreamingImages
from paragan.data.tools.contact_sheet import make_contact_sheet
from paragan.data.tools.convert import ConvertOptions, convert
from paragan.data.tools.inspect_dataset import inspect_dataset
from paragan.data.tools.writers import choose_format

RNG = np.random.default_rng(0)
WIDE = RNG.integers(0, 256, (6, 8, 16, 3), np.uint8)  # 16 wide, 8 high
BANDS = RNG.integers(0, 256, (6, 8, 12, 5), np.uint8)
FORMS = {"folder": "set", "npz": "set.npz", "zip": "set.zip", "h5": "set.h5", "tars": "shards"}


def write(folder: Path, images: np.ndarray, **options) -> Path:
    """Write images [N, H, W, C] as PNGs of two classes."""
    for index, image in enumerate(images):
        path = folder / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path, **options)
    return folder


def in_order(dataset: Dataset) -> np.ndarray:
    assert dataset.labels is not None
    return np.asarray(dataset.images)


def usage_message(where: Path, **options) -> str:
    with pytest.raises(UsageError) as caught:
        load_data(str(where), **({"resolution": None} | options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Sizes ------------------------------------------------------------------------------------------------------


def test_images_of_the_asked_size_are_unchanged_in_every_container(tmp_path):
    expected = np.concatenate([WIDE[::2], WIDE[1::2]])
    source = write(tmp_path / "photos", WIDE)
    sets = {}
    for form, name in FORMS.items():
        convert(open_source(str(source)), tmp_path / name, choose_format(tmp_path / name, form), ConvertOptions())
        sets[form] = load_data(str(tmp_path / name), resolution="16x8")
        assert np.array_equal(in_order(sets[form]), expected), form
        assert sets[form].shape == (3, 8, 16)
        assert "16 wide, 8 high" in sets[form].describe()
        assert "unchanged" in sets[form].describe()
    assert len({dataset.fingerprint for dataset in sets.values()}) == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_conversion_crops_and_resizes_as_training_does(tmp_path, form):
    source = write(tmp_path / "photos", RNG.integers(0, 256, (4, 20, 30, 3), np.uint8))
    out = tmp_path / FORMS[form]
    convert(open_source(str(source)), out, choose_format(out, form), ConvertOptions(resolution="8x12"))
    converted = load_data(str(out), resolution="8x12")
    assert "unchanged" in converted.describe()
    assert converted.fingerprint == load_data(str(source), resolution="8x12").fingerprint


def test_the_largest_centred_part_of_the_shape_is_kept(tmp_path):
    pixels = RNG.integers(0, 256, (20, 50, 3), np.uint8)
    write(tmp_path, pixels[None])
    (image,) = load_data(str(tmp_path), resolution="32x16").images
    part = Image.fromarray(pixels[:, 5:45])  # 40 wide, 20 high
    assert np.array_equal(image, np.asarray(part.resize((32, 16), Image.Resampling.LANCZOS)))
    assert decode.largest_part(ImageSize(50, 20), ImageSize(1, 1)) == (20, 20)
    assert decode.largest_part(ImageSize(20, 50), ImageSize(3, 2)) == (20, 13)


def test_without_a_request_they_are_squares_and_the_report_names_the_size_that_keeps_them(tmp_path):
    dataset = load_data(str(write(tmp_path, WIDE)), resolution=None)
    assert dataset.shape == (3, 8, 8)
    text = " ".join(dataset.describe().split())
    assert "centre-cropped" in text
    assert "--data.resolution=16x8 (WIDTHxHEIGHT)" in text
    assert load_data(str(tmp_path), resolution="16x8").shape == (3, 8, 16)


def test_streamed_images_are_those_in_memory(tmp_path):
    write(tmp_path, WIDE)
    in_memory = load_data(str(tmp_path), resolution="12x8", cache="memory")
    streamed = load_data(str(tmp_path), resolution="12x8", cache="stream")
    assert isinstance(streamed.images, StreamingImages)
    batches = itertools.repeat(BatchIndices(np.array([4, 1, 0]), np.array([False, True, False])))
    pipeline = PrefetchPipeline(streamed.images, batches)
    try:
        batch = pipeline.next_batch().copy()
    finally:
        pipeline.close()
    expected = np.stack([in_memory.images[4], in_memory.images[1][:, ::-1], in_memory.images[0]])
    assert np.array_equal(batch, expected)


def test_a_report_and_its_sheet_have_the_shape(tmp_path):
    report = inspect_dataset(open_source(str(write(tmp_path, WIDE))), resolution="16x8")
    assert "training  16 wide, 8 high, RGB" in "\n".join(report.to_lines())
    assert report.to_json()["training"]["resolution"] == "16x8"
    sheet = make_contact_sheet(report)
    assert sheet.width > sheet.height  # two rows of three


def test_arrays_from_python_need_not_be_square():
    assert from_arrays(WIDE).shape == (3, 8, 16)


# Channels ---------------------------------------------------------------------------------------------------


def save(path: Path, images: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, images)
    elif path.suffix == ".npz":
        np.savez(path, images=images)
    else:
        import h5py

        with h5py.File(path, "w") as file:
            file["imgs"] = images
    return path


@pytest.mark.parametrize("name", ["a.npz", "a.npy", "a.h5"])
def test_all_channels_are_read_on_request(tmp_path, name):
    path = save(tmp_path / name, BANDS)
    message = usage_message(path)
    assert "--data.channels=5" in message
    dataset = load_data(str(path), resolution="12x8", channels=5)  # as the message says
    assert np.array_equal(dataset.images, BANDS)
    assert "5 channels" in dataset.describe()
    streamed = load_data(str(path), resolution="12x8", channels=5, cache="stream")
    assert np.array_equal(streamed.images[np.arange(6)], BANDS)


def test_channels_that_come_first(tmp_path):
    first = BANDS.transpose(0, 3, 1, 2)
    assert np.array_equal(load_data(str(save(tmp_path / "a.h5", first)), resolution="12x8", channels=5).images, BANDS)
    message = usage_message(save(tmp_path / "a.npz", first))
    assert "images.transpose(0, 2, 3, 1)" in message
    assert "--data.channels=5" in message
    save(tmp_path / "a.npz", first.transpose(0, 2, 3, 1))  # as the message says
    assert load_data(str(tmp_path / "a.npz"), resolution="12x8", channels=5).shape == (5, 8, 12)


def test_channels_are_resized_one_by_one(tmp_path):
    path = save(tmp_path / "a.npz", BANDS)
    dataset = load_data(str(path), resolution=4, channels=5)
    for channel in range(5):
        square = Image.fromarray(np.ascontiguousarray(BANDS[2, :, 2:10, channel]))
        assert np.array_equal(dataset.images[2][:, :, channel], square.resize((4, 4), Image.Resampling.LANCZOS))


def test_transparency_is_a_fourth_channel_on_request(tmp_path):
    rgba = RNG.integers(0, 256, (4, 8, 8, 4), np.uint8)
    source = write(tmp_path / "icons", rgba)
    Image.fromarray(WIDE[0, :, :8]).save(source / "a" / "opaque.jpg", quality=95)
    assert load_data(str(source), resolution=8).shape == (3, 8, 8)  # composited, as before
    dataset = load_data(str(source), resolution=8, channels=4)
    assert np.array_equal(dataset.images[:2], rgba[::2])
    assert (dataset.images[2][:, :, 3] == 255).all()
    assert "1 have no transparency: their alpha is 255" in dataset.describe()
    for form, name in FORMS.items():
        out = tmp_path / name
        convert(open_source(str(source)), out, choose_format(out, form), ConvertOptions(channels=4))
        assert load_data(str(out), resolution=8, channels=4).fingerprint == dataset.fingerprint, form


def test_channels_that_are_not_there_are_refused(tmp_path):
    source = str(write(tmp_path / "photos", WIDE))
    with advises(f"data.channels=4: no image of {source} has transparency, the fourth channel. Use 3"):
        load_data(source, resolution=8, channels=4)
    assert load_data(source, resolution=8, channels=3).shape == (3, 8, 8)
    path = str(save(tmp_path / "a.npz", WIDE))
    with advises(f"data.channels=4: {path} has 3 channels. Use 1 or 3"):
        load_data(path, resolution=8, channels=4)
    assert [load_data(path, resolution=8, channels=channels).shape[0] for channels in (1, 3)] == [1, 3]


def test_more_channels_than_files_have_are_stored_as_advised(tmp_path):
    opaque = str(write(tmp_path / "photos", WIDE))
    rgba = str(write(tmp_path / "icons", RNG.integers(0, 256, (4, 8, 8, 4), np.uint8)))
    for source, usable in ((opaque, (1, 3)), (rgba, (1, 3, 4))):
        numbers = " or ".join(", ".join(map(str, usable)).rsplit(", ", 1))
        with advises(
            "data.channels=5: image files have 1 (grey), 3 (RGB) or 4 (RGB and alpha) channels. "
            f"Use {numbers}, or store all channels in an .npz or .h5"
        ):
            load_data(source, resolution=8, channels=5)
        for channels in usable:
            assert load_data(source, resolution=8, channels=channels).shape[0] == channels
    for name in ("a.npz", "a.h5"):
        assert load_data(str(save(tmp_path / name, BANDS)), resolution=8, channels=5).shape[0] == 5


def test_uint8_arrays_are_images_or_numbers_as_advised():
    with advises("are not images [N, H, W, C] with C 1 or 3. Use channels=C for another C"):
        from_arrays(BANDS)
    assert from_arrays(BANDS, channels=5).shape == (5, 8, 12)
    for x in (BANDS[0, 0, 0], BANDS[0, 0], BANDS[None]):
        with advises(
            f"data: uint8 {list(x.shape)} are not images [N, H, W, C]. Use x.reshape(len(x), -1).astype('float32') "
            "for other numbers"
        ):
            from_arrays(x)
        assert from_arrays(x.reshape(len(x), -1).astype("float32")).is_array
    with pytest.raises(UsageError, match=r"uint8 \[0, 8, 12, 5\] holds no image"):
        from_arrays(BANDS[:0])


def test_channels_are_converted_as_advised(tmp_path):
    bands = str(save(tmp_path / "a.npz", BANDS))
    with advises("--channels=5: files hold 1, 3 or 4 channels. Use an .npz or .h5"):
        convert(
            open_source(bands, channels=5), tmp_path / "b", choose_format(tmp_path / "b"), ConvertOptions(channels=5)
        )
    for out in (tmp_path / "b.npz", tmp_path / "b.h5"):
        convert(open_source(bands, channels=5), out, choose_format(out), ConvertOptions(channels=5))
        assert np.array_equal(load_data(str(out), resolution="12x8", channels=5).images, BANDS)


def test_transparency_is_written_in_the_format_advised(tmp_path):
    source = str(write(tmp_path / "icons", RNG.integers(0, 256, (4, 8, 8, 4), np.uint8)))
    out = tmp_path / "out"
    with advises("--channels=4: a JPEG has no transparency. Use --format png"):
        convert(open_source(source), out, choose_format(out), ConvertOptions(channels=4, encoding="jpg"))
    convert(open_source(source), out, choose_format(out), ConvertOptions(channels=4, encoding="png"))
    assert load_data(str(out), resolution=8, channels=4).shape == (4, 8, 8)


# Many pixels ------------------------------------------------------------------------------------------------


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60)


def test_images_above_the_limit_are_read_on_request(tmp_path, small_limit):
    write(tmp_path, WIDE)
    message = usage_message(tmp_path)
    assert "--data.max_pixels=128 " in message
    dataset = load_data(str(tmp_path), resolution="16x8", max_pixels=128)  # as the message says
    assert np.array_equal(dataset.images[0], WIDE[0])


def test_decode_processes_have_the_limit_of_their_owner(tmp_path, small_limit):
    data = (write(tmp_path, WIDE) / "a" / "0.png").read_bytes()
    arena = SharedArena()
    block = arena.allocate((1, 8, 16, 3))
    with DecodeWorker(arena) as worker:
        reasons, _ = worker.decode([data], [False], block, 0)
        assert "more than 60 pixels" in str(reasons[0])
    decode.allow_pixels(128)
    with DecodeWorker(arena) as worker:
        assert worker.decode([data], [False], block, 0)[0] == [None]
    assert np.array_equal(block.array[0], WIDE[0])
