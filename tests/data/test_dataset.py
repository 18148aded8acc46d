"""What `load` makes of real files: sizes, colours, order, labels, and one clear line for everything else."""

import io
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from advice import advises
from paragan.core.errors import UsageError
from paragan.data import decode
from paragan.data.dataset import Dataset, choose_resolution, compute_fingerprint, load_data

RNG = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


def put(path: Path, pixels: np.ndarray | None = None, **options) -> np.ndarray:
    """Write pixels ([8, 8, 3] noise if None) as an image file and return them."""
    pixels = noise(8, 8, 3) if pixels is None else pixels
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return pixels


def npz(path: Path, **arrays) -> str:
    np.savez(path, **arrays)
    return str(path)


def usage_message(where, **options) -> str:
    with pytest.raises(UsageError) as caught:
        load_data(str(where), resolution=options.pop("resolution", 8), **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def only(pixels: np.ndarray, folder: Path, name: str = "a.png", **options) -> np.ndarray:
    """The one image of a folder, as loaded."""
    put(folder / name, pixels)
    (image,) = load_data(str(folder), resolution=options.pop("resolution", None), **options).images
    return image


# Digits -----------------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns_scaled_to_bytes():
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    result = load_data("digits", resolution=None)
    assert result.images.shape == (1797, 8, 8, 1)
    assert result.images.dtype == np.uint8
    assert (result.images.reshape(1797, 64) == np.round(values * 255 / 16)).all()
    assert (result.labels == labels).all()
    assert result.labels.dtype == np.int64
    assert result.classes == tuple("0123456789")


def test_digits_resize_and_repeat_to_rgb():
    result = load_data("digits", resolution=32, channels=3, labels=False)
    assert result.images.shape == (1797, 32, 32, 3)
    assert (result.images == result.images[..., :1]).all()
    assert result.labels is None
    assert result.classes == ()


# Folders ----------------------------------------------------------------------------------------------------


def test_a_folder_of_classes_is_labelled_by_the_order_of_names(tmp_path):
    expected = [put(tmp_path / name) for name in ("Zebra/b.PNG", "ant/a.png", "ant/b.bmp", "bee/c.png")]
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "ant" / ".DS_Store").write_bytes(b"")
    (tmp_path / "ant" / "notes.txt").write_text("not an image")
    result = load_data(str(tmp_path), resolution=None)
    assert result.classes == ("Zebra", "ant", "bee")
    assert result.labels is not None
    assert result.labels.tolist() == [0, 1, 1, 2]
    assert result.labels.dtype == np.int64
    assert (result.images == np.stack(expected)).all()
    assert "ignored other files (1): .txt" in result.describe()


def test_a_folder_around_all_images_is_no_class(tmp_path):
    put(tmp_path / "flat" / "b.png")
    put(tmp_path / "flat" / "a.png")
    put(tmp_path / "one" / "cat" / "a.png")
    for name in ("flat", "one"):
        data = load_data(str(tmp_path / name), resolution=8)
        assert data.labels is None
        assert data.classes == ()


def test_order_is_that_of_names_whatever_the_threads_do(tmp_path):
    expected = np.stack([put(tmp_path / f"{index:04d}.png", noise(8, 8)) for index in range(200)])
    result = load_data(str(tmp_path), resolution=8)
    assert (result.images[..., 0] == expected).all()
    assert result.fingerprint == load_data(str(tmp_path), resolution=8).fingerprint


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".JPEG", ".webp", ".bmp"])
def test_every_format_is_read(tmp_path, suffix):
    options = {"lossless": True} if suffix == ".webp" else {}
    grey = np.full((8, 8, 3), 77, np.uint8)
    put(tmp_path / f"a{suffix}", grey, **options)
    result = load_data(str(tmp_path), resolution=8)
    assert (np.abs(result.images.astype(int) - 77) <= 1).all()


# Colours ----------------------------------------------------------------------------------------------------


def test_the_right_size_is_untouched_bit_for_bit(tmp_path):
    for name, pixels in {"grey": noise(16, 16), "rgb": noise(16, 16, 3)}.items():
        assert (only(pixels, tmp_path / name).squeeze() == pixels).all()


def test_rgba_is_composited_on_white(tmp_path):
    pixels = noise(16, 16, 4)
    pixels[..., 3] = np.where(np.arange(16) < 8, 255, 0)
    pixels[0, :, 3] = 128
    result = only(pixels, tmp_path)
    assert (result[1:, :8] == pixels[1:, :8, :3]).all()
    assert (result[1:, 8:] == 255).all()
    blend = (pixels[0, :, :3] * 128.0 + 255 * 127.0) / 255
    assert (np.abs(result[0] - blend) <= 1).all()
    assert "1 may have transparency, which is composited on white" in load_data(str(tmp_path), resolution=8).describe()


def test_grey_with_alpha_stays_grey(tmp_path):
    pixels = noise(8, 8, 2)
    pixels[..., 1] = 255
    pixels[0, 0, 1] = 0
    result = only(pixels, tmp_path)
    assert result.shape == (8, 8, 1)
    assert result[0, 0] == 255
    assert (result[1:, :, 0] == pixels[1:, :, 0]).all()


def test_palettes_are_expanded_with_their_transparency(tmp_path):
    image = Image.fromarray((np.arange(64, dtype=np.uint8) % 3).reshape(8, 8))
    image.putpalette([255, 0, 0, 0, 255, 0, 9, 9, 9])
    image.save(tmp_path / "a.png", transparency=2)
    (result,) = load_data(str(tmp_path), resolution=8).images
    assert result[0, :3].tolist() == [[255, 0, 0], [0, 255, 0], [255, 255, 255]]


def test_a_grey_palette_and_one_bit_are_grey(tmp_path):
    image = Image.fromarray((np.arange(64, dtype=np.uint8) % 2).reshape(8, 8))
    image.putpalette([7, 7, 7, 200, 200, 200])
    image.save(tmp_path / "a.png")
    Image.fromarray(np.eye(8, dtype=bool)).save(tmp_path / "b.png")
    result = load_data(str(tmp_path), resolution=8).images
    assert result.shape == (2, 8, 8, 1)
    assert result[0, 0, :2, 0].tolist() == [7, 200]
    assert (result[1, :, :, 0] == 255 * np.eye(8)).all()


def test_sixteen_bits_keep_the_high_byte(tmp_path):
    pixels = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    assert (only(pixels, tmp_path)[..., 0] == pixels >> 8).all()


def test_cmyk_jpeg_becomes_rgb(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "red.jpg")
    (result,) = load_data(str(tmp_path), resolution=8).images
    red, green, blue = result.reshape(-1, 3).mean(axis=0)
    assert red > 200
    assert max(green, blue) < 60
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 4), np.uint8), mode="CMYK").save(
        tmp_path / "red.jpg"
    )
    with Image.open(tmp_path / "red.jpg") as image:
        assert np.array_equal(load_data(str(tmp_path), resolution=8).images[0], np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".png", ".webp"])
def test_exif_orientation_is_undone(tmp_path, orientation, suffix):
    upright = noise(8, 8, 3)
    stored = {  # what a camera held in that way writes
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if suffix == ".webp" else {}
    put(tmp_path / f"a{suffix}", np.ascontiguousarray(stored), exif=exif, **options)
    (result,) = load_data(str(tmp_path), resolution=8).images
    assert (result == upright).all()


def test_damaged_exif_does_not_rotate(tmp_path):
    for index, exif in enumerate((b"Exif\x00\x00garbage", b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x09\x00", b"\x00")):
        put(tmp_path / f"{index}.jpg", np.full((8, 8, 3), 77, np.uint8), exif=exif)
    assert load_data(str(tmp_path), resolution=8).images.shape == (3, 8, 8, 3)


def test_channels_can_be_set(tmp_path):
    colour, grey = noise(8, 8, 3), noise(8, 8)
    assert (only(grey, tmp_path / "g", channels=3) == grey[..., None]).all()
    expected = np.asarray(Image.fromarray(colour).convert("L"))
    assert (only(colour, tmp_path / "c", channels=1)[..., 0] == expected).all()


def test_one_colour_image_makes_all_rgb(tmp_path):
    put(tmp_path / "a.png", noise(8, 8))
    put(tmp_path / "b.png")
    assert load_data(str(tmp_path), resolution=8).images.shape == (2, 8, 8, 3)


# Sizes ------------------------------------------------------------------------------------------------------


def test_the_rule_is_centre_crop_then_lanczos(tmp_path):
    wide, tall = noise(20, 31, 3), noise(40, 21, 3)
    put(tmp_path / "a.png", wide)
    put(tmp_path / "b.png", tall)
    result = load_data(str(tmp_path), resolution=16).images
    squares = Image.fromarray(wide[:, 5:25]), Image.fromarray(tall[9:30])
    for received, square in zip(result, squares, strict=True):
        assert (received == np.asarray(square.resize((16, 16), Image.Resampling.LANCZOS))).all()


def test_array_and_folder_follow_the_same_rule(tmp_path):
    images = noise(5, 12, 20, 3)
    for index, image in enumerate(images):
        put(tmp_path / "folder" / f"{index}.png", image)
    stored = load_data(npz(tmp_path / "a.npz", images=images), resolution=None)
    assert (stored.images == load_data(str(tmp_path / "folder"), resolution=None).images).all()
    assert stored.images.shape == (5, 16, 16, 3)


@pytest.mark.parametrize(
    ("sizes", "resolution"),
    [
        ([(8, 8)], 8),
        ([(256, 256), (256, 256)], 256),
        ([(28, 28)], 32),
        ([(4, 4)], 8),
        ([(32, 48)], 32),
        ([(32, 32), (64, 64)], 64),
        ([(33, 90), (20, 20), (500, 33)], 64),
        ([(640, 480), (1024, 768)], 64),
        ([(250, 250)], 64),
        ([(1, 1000)], 8),
    ],
)
def test_a_resolution_is_chosen(sizes, resolution):
    assert choose_resolution(np.array(sizes)) == resolution


# Npz --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64, ">i4"])
def test_npz_keeps_pixels_labels_and_names(tmp_path, dtype):
    images = noise(6, 8, 8)
    labels = np.array([0, 1, 2, 2, 1, 0], dtype)
    where = npz(tmp_path / "a.NPZ.npz", images=images, labels=labels, classes=np.array(["a", "b", "c"]))
    result = load_data(where, resolution=None)
    assert (result.images[..., 0] == images).all()
    assert result.labels is not None
    assert result.labels.dtype == np.int64
    assert (result.labels == labels).all()
    assert result.classes == ("a", "b", "c")


def test_npz_without_names_counts_classes_and_without_labels_has_none(tmp_path):
    labelled = load_data(npz(tmp_path / "a.npz", images=noise(3, 8, 8, 1), labels=[2, 0, 1]), resolution=None)
    assert labelled.classes == ("0", "1", "2")
    plain = load_data(npz(tmp_path / "b.npz", images=np.asfortranarray(noise(3, 8, 8, 3)), extra=[1]), resolution=None)
    assert plain.labels is None
    assert plain.classes == ()
    assert "ignored keys: extra" in plain.describe()


@pytest.mark.parametrize("key", ["label", "y", "y_train", "targets", "target", "Labels"])
def test_npz_labels_have_other_usual_keys(tmp_path, key):
    labels = [2, 0, 1]
    where = npz(tmp_path / "a.npz", images=noise(3, 8, 8), **{key: labels})
    result = load_data(where, resolution=8)
    assert result.labels is not None
    assert result.labels.tolist() == labels
    assert f"labels of key {key}" in result.notes
    both = npz(tmp_path / "b.npz", images=noise(3, 8, 8), **{key: labels}, Target=[0, 1, 0])
    assert "has several labels (" in usage_message(both)
    chosen = load_data(both, resolution=8, labels="Target")
    assert chosen.labels is not None
    assert chosen.labels.tolist() == [0, 1, 0]
    assert "data.label_key=z: " in usage_message(both, labels="z")
    assert load_data(both, resolution=8, labels=False).labels is None


def test_the_key_of_labels_is_refused_where_there_is_no_choice(tmp_path):
    put(tmp_path / "cat" / "a.png")
    put(tmp_path / "dog" / "a.png")
    for where in ("digits",):
        assert "data.label_key=y: " in usage_message(where, labels="y")


@pytest.mark.parametrize(
    ("key", "expected"),
    [("lables", "has no labels, but lables. Use --data.label_key=lables if"), ("classs", "should be called classes")],
)
def test_misspelled_labels_can_be_left_out(tmp_path, key, expected):
    where = npz(tmp_path / "a.npz", images=noise(3, 8, 8), **{key: [0, 1, 2]})
    assert expected in usage_message(where)
    assert "--data.labels=false" in usage_message(where)
    assert load_data(where, resolution=8, labels=False).labels is None


def test_labels_that_are_dropped_need_not_be_valid(tmp_path):
    where = npz(tmp_path / "a.npz", images=noise(3, 8, 8), labels=[0.5, -1.0])
    assert load_data(where, resolution=8, labels=False).labels is None


# What is said -----------------------------------------------------------------------------------------------


def test_describe_lists_what_was_read(tmp_path):
    put(tmp_path / "cat" / "a.png", noise(28, 40))
    put(tmp_path / "cat" / "b.png", noise(20, 30))
    put(tmp_path / "dog" / "a.png", noise(28, 28))
    text = load_data(str(tmp_path), resolution=None).describe()
    assert "3 images, 32 x 32, grey" in text
    assert "2 classes: cat (2), dog (1)" in text
    assert "3 sizes, 20 x 30 to 28 x 40" in text.replace("30 x 20", "20 x 30").replace("40 x 28", "28 x 40")
    assert "resolution 32 is the default" in text
    assert "unchanged" in load_data("digits", resolution=8).describe()


def test_describe_stays_short_with_a_thousand_classes():
    labels = np.repeat(np.arange(1000), np.arange(1000) % 7 + 1)
    images = np.zeros((len(labels), 8, 8, 1), np.uint8)
    text = Dataset(images, labels, tuple(f"class {label}" for label in range(1000)), "").describe()
    assert len(text.splitlines()) <= 4
    assert max(map(len, text.splitlines())) <= 100
    assert "1,000 classes of 1 to 7 images" in text
    assert "smallest: class 0 (1)" in text


def test_the_fingerprint_covers_shape_pixels_and_labels():
    images, labels = noise(4, 8, 8, 1), np.arange(4)
    other = images.copy()
    other[3, 7, 7, 0] ^= 1
    prints = [
        compute_fingerprint(images, labels),
        compute_fingerprint(images, labels[::-1]),
        compute_fingerprint(images, None),
        compute_fingerprint(other, labels),
        compute_fingerprint(images.reshape(4, 4, 16, 1), labels),
    ]
    assert len(set(prints)) == 5
    assert prints[0] == compute_fingerprint(images.copy(), labels.astype(np.int32))
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in prints)


# What is refused --------------------------------------------------------------------------------------------


def test_a_missing_path_names_what_is_near(tmp_path):
    (tmp_path / "flowers").mkdir()
    message = usage_message(tmp_path / "flowres")
    assert "does not exist: did you mean flowers?" in message
    assert f"(there is no {tmp_path / 'flowres'})" in usage_message(tmp_path / "flowres" / "a" / "b")
    assert "digits" in usage_message("digist")
    assert ".npz" in usage_message(tmp_path / "qqqqqqqqqq")
    assert "does not exist" in usage_message(tmp_path / "flowers\nx")


def test_paths_the_system_cannot_take(tmp_path):
    assert "File name too long" in usage_message(tmp_path / ("x" * 300))
    assert "does not exist" in usage_message("a\0b")
    with advises("data: no location is given. Give `digits`, an .npz"):
        load_data("", resolution=None)
    assert len(load_data("digits", resolution=None).images) == 1797


def test_an_empty_folder(tmp_path):
    (tmp_path / ".hidden").write_text("")
    assert f"{tmp_path} is empty" in usage_message(tmp_path)


def test_a_folder_without_images_names_the_extensions_it_has(tmp_path):
    for name in ("a.avi", "b.TXT", "README"):
        (tmp_path / name).write_text("x")
    message = usage_message(tmp_path)
    assert "no image, only (no extension), .avi, .txt (3 files)" in message
    assert ".png" in message


def test_class_folders_without_any_image(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.avi").write_text("x")
    assert "holds no image, only .avi" in usage_message(tmp_path)


def test_a_folder_one_level_too_high_names_the_next(tmp_path):
    put(tmp_path / "train" / "cat" / "a.png")
    (tmp_path / "test").mkdir()
    assert f"give one of them, such as {tmp_path / 'train'}" in usage_message(tmp_path)


def test_a_class_without_images_is_named(tmp_path):
    put(tmp_path / "cat" / "a.png")
    (tmp_path / "dog").mkdir()
    assert f"{tmp_path / 'dog'}: this class has no image: add one" in usage_message(tmp_path)
    (tmp_path / "emu").mkdir()
    assert f"{tmp_path / 'dog'}: this class has no image, nor have 1 more: add" in usage_message(tmp_path)


def test_images_beside_folders_are_refused(tmp_path):
    put(tmp_path / "a.png")
    put(tmp_path / "cat" / "a.png")
    assert "images (1) and folders (1) side by side" in usage_message(tmp_path)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".bmp"])
@pytest.mark.parametrize("retained", [0.0, 0.02, 0.5, 0.9])
def test_truncated_images_are_named(tmp_path, suffix, retained):
    put(tmp_path / f"good{suffix}")
    put(tmp_path / f"bad{suffix}", noise(64, 64, 3))
    data = (tmp_path / f"bad{suffix}").read_bytes()
    (tmp_path / f"bad{suffix}").write_bytes(data[: int(len(data) * retained)])
    message = usage_message(tmp_path)
    assert f"{tmp_path / f'bad{suffix}'} cannot be decoded" in message
    assert "more of" not in message


def test_of_several_damaged_images_the_first_and_their_number_are_named(tmp_path):
    for name in ("a", "b", "c", "d"):
        put(tmp_path / f"{name}.png", noise(32, 32))
    (tmp_path / "b.png").write_bytes((tmp_path / "b.png").read_bytes()[:500])  # has a header
    (tmp_path / "c.png").write_text("no image at all")
    (tmp_path / "d.png").unlink()
    (tmp_path / "d.png").symlink_to(tmp_path / "nowhere")
    message = usage_message(tmp_path)
    assert f"{tmp_path / 'b.png'} cannot be decoded" in message
    assert "(and 2 more of 4 images)" in message


def test_a_set_of_damaged_images_only(tmp_path):
    for name in ("a.png", "b.jpg"):
        (tmp_path / name).write_text("no image at all")
    message = usage_message(tmp_path)
    assert "a.png cannot be decoded: not a PNG, JPEG, WebP, BMP, TIFF or GIF image (and 1 more of 2 images)" in message


@pytest.mark.parametrize("limit", [40, 60])  # Pillow raises above twice its limit, and only warns above it
def test_decompression_bombs_are_refused(tmp_path, monkeypatch, limit):
    put(tmp_path / "a.png", noise(10, 10))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    message = usage_message(tmp_path)
    assert f"a.png cannot be decoded: more than {limit} pixels" in message


def test_more_pixels_than_memory_are_refused_before_they_are_allocated(tmp_path, monkeypatch):
    for name in ("a", "b", "c", "d"):
        put(tmp_path / "set" / f"{name}.png", noise(8, 8))
    monkeypatch.setattr(decode, "ram_bytes", lambda: 2 * 4 * 32 * 32)
    message = usage_message(tmp_path / "set", resolution=64)
    assert "4 images of 64 x 64 x 1" in message
    assert "use resolution 32 or less" in message
    assert load_data(str(tmp_path / "set"), resolution=32).images.shape == (4, 32, 32, 1)
    monkeypatch.setattr(decode, "ram_bytes", lambda: 10)
    assert "use fewer images" in usage_message(tmp_path / "set")


def test_an_npz_that_claims_more_than_memory_is_refused_unread(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("images.npy", "w") as file:
        header = {"shape": (10**9, 64, 64, 3), "fortran_order": False, "descr": "|u1"}
        np.lib.format.write_array_header_1_0(file, header)
    assert "more than half of this machine's" in usage_message(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x_train": noise(2, 8, 8), "y": [0, 1]}, "has no images; found x_train, y; expected images"),
        ({}, "has no images; found nothing"),
        ({"images": noise(2, 8, 8), "y": [0.5, 1]}, "y are float64 and hold 0.5, which is no class"),
        ({"images": noise(2, 8, 8), "classes": ["a"]}, "has classes but no labels"),
        ({"images": np.zeros((2, 8, 8), np.complex64)}, "images are complex64, expected numbers: save them as uint8"),
        ({"images": noise(8, 8)}, "images are [8, 8], expected [N, H, W, C]"),
        ({"images": noise(2, 3, 8, 8)}, "images.transpose(0, 2, 3, 1)"),
        ({"images": noise(2, 8, 8, 4)}, "images are [2, 8, 8, 4], expected [N, H, W, C] with C 1 or 3"),
        ({"images": noise(0, 8, 8, 3)}, "no image"),
        ({"images": noise(2, 0, 8, 3)}, "no image"),
        ({"images": noise(2, 8, 8), "labels": [0, 1, 0]}, "3 labels for 2 images"),
        ({"images": noise(2, 8, 8), "labels": [0, -1]}, "1 of 2 labels are negative (-1)"),
        ({"images": noise(2, 8, 8), "labels": [[0], [1]]}, "labels.reshape(-1)"),
        ({"images": noise(2, 8, 8), "labels": [0, 3]}, "2 of these classes have no image (1, 2)"),
        ({"images": noise(2, 8, 8), "labels": [0, 2**62]}, "(1, 2, 3, 4, 5, ...)"),
        ({"images": noise(2, 8, 8), "labels": np.array([0, 2**64 - 1], np.uint64)}, "have no image"),
        ({"images": noise(2, 8, 8), "labels": [0, 3], "classes": ["a", "b"]}, "label 3 but 2 classes"),
        ({"images": noise(2, 8, 8), "labels": [0, 1], "classes": ["a", "a"]}, "2 classes are called 'a'"),
        ({"images": noise(2, 8, 8), "labels": [0, 1], "classes": [1, 2]}, "np.array(names, dtype=str)"),
    ],
)
def test_invalid_npz_files_are_refused_with_the_reason(tmp_path, arrays, expected):
    where = npz(tmp_path / "a.npz", **arrays)
    message = usage_message(where)
    assert expected in message
    assert where in message


class Trap:
    """Unpickling this leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("key", ["images", "labels", "classes"])
def test_pickled_arrays_are_refused_without_running_code(tmp_path, key):
    trap = np.array([Trap(tmp_path / "sprung")] * 2, dtype=object)
    arrays = {"images": noise(2, 8, 8), "labels": [0, 1], "classes": ["a", "b"], key: trap}
    message = usage_message(npz(tmp_path / "a.npz", **arrays))
    assert f"{key} are object" in message
    assert not (tmp_path / "sprung").exists()


def test_files_that_are_no_npz(tmp_path):
    np.save(tmp_path / "a.npy", noise(2, 8, 8))
    (tmp_path / "a.npy").rename(tmp_path / "renamed.npz")
    (tmp_path / "empty.npz").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        archive.writestr("images.npy", "this is not an array")
    good = io.BytesIO()
    np.save(good, noise(2, 8, 8))
    for name, damage in {
        "open": good.getvalue().replace(b"}", b" "),
        "key": good.getvalue().replace(b"'d", b" 0"),
    }.items():
        with zipfile.ZipFile(tmp_path / f"{name}.npz", "w") as archive:
            archive.writestr("images.npy", damage)
    for name in ("renamed", "empty", "text", "open", "key"):
        assert f"{name}.npz is not an npz, or is damaged" in usage_message(tmp_path / f"{name}.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_npz_never_escapes_as_a_traceback(tmp_path, save):
    path = tmp_path / "a.npz"
    save(path, images=noise(20, 8, 8), labels=np.arange(20), classes=np.array(list("abcdefghijklmnopqrst")))
    data = path.read_bytes()
    for length in (10, len(data) // 2, len(data) - 10):
        path.write_bytes(data[:length])
        assert "is not an npz, or is damaged" in usage_message(path)
    for position in range(0, len(data), 29):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
        try:
            load_data(str(path), resolution=8)
        except UsageError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_unsupported_files_are_refused_with_the_formats(tmp_path):
    (tmp_path / "a.rar").write_text("")
    (tmp_path / "noext").write_text("")
    put(tmp_path / "a.png")
    with advises(
        f"data: {tmp_path / 'a.rar'} has .rar, which is not a supported format. Give `digits`, an .npz, .npy, .zip, "
        ".h5 or .parquet, .tar shards (shard-*.tar, shard-{000..012}.tar), or a folder: of images"
    ):
        load_data(str(tmp_path / "a.rar"), resolution=None)
    assert "(no extension)" in usage_message(tmp_path / "noext")
    assert len(load_data(str(tmp_path), resolution=None).images) == 1
    assert f"is one image. Give its folder, {tmp_path}" in usage_message(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"resolution": 0}, "resolution=0"), ({"resolution": -8}, "one number for squares"), ({"channels": 4}, "1")],
)
def test_impossible_requests(options, expected):
    assert expected in usage_message("digits", **options)


@pytest.fixture
def locked():
    """A folder with files that may not be read, met as a user: root may read everything."""
    with tempfile.TemporaryDirectory() as name:  # not tmp_path, whose parents are closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        npz(folder / "a.npz", images=noise(2, 8, 8))
        put(folder / "flat" / "a.png")
        put(folder / "set" / "cat" / "a.png")
        for path in ("a.npz", "flat/a.png", "set/cat"):
            (folder / path).chmod(0)
        Image.init()
        if os.geteuid() != 0:
            yield folder
        else:
            os.seteuid(65534)
            yield folder
            os.seteuid(0)
        (folder / "set" / "cat").chmod(0o755)


def test_what_may_not_be_read_is_named(locked):
    assert f"{locked / 'a.npz'} cannot be read: Permission denied" in usage_message(locked / "a.npz")
    assert "a.png cannot be decoded: Permission denied" in usage_message(locked / "flat")
    assert f"{locked / 'set' / 'cat'} cannot be read: Permission denied" in usage_message(locked / "set")
