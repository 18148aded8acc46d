"""Grids and saved sets: what is written is what was given."""

import numpy as np
import pytest
from PIL import Image

from advice import Case, advises, case_id
from paragan.core.errors import UsageError
from paragan.core.image_grid import make_grid, save_arrays, save_images
from paragan.core.wav_files import read_wav
from paragan.data.dataset import load_data

RNG = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


def error_message(call, *args, **kwargs) -> str:
    with pytest.raises(UsageError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("channels", [1, 3])
def test_tiles_lie_row_by_row_with_gutters_between(channels):
    images = noise(5, 4, 6, channels)
    sheet = make_grid(images, columns=3, scale=2)
    assert sheet.size == (3 * 12 + 2 * 2, 2 * 8 + 2)
    assert sheet.mode == ("L" if channels == 1 else "RGB")
    pixels = np.asarray(sheet).reshape(18, 40, channels)
    gutters = np.ones((18, 40), bool)
    for index, image in enumerate(images):
        row, column = divmod(index, 3)
        cell = slice(10 * row, 10 * row + 8), slice(14 * column, 14 * column + 12)
        for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
            assert (pixels[cell][corner[0] :: 2, corner[1] :: 2] == image).all()
        gutters[cell] = False
    assert (pixels[gutters] == 128).all()


@pytest.mark.parametrize(("count", "size"), [(1, (4, 4)), (2, (10, 4)), (9, (16, 16)), (10, (22, 16))])
def test_a_grid_is_about_square(count, size):
    assert make_grid(noise(count, 4, 4, 1)).size == size


def test_more_columns_than_images_leave_grey():
    assert make_grid(noise(2, 4, 4, 1), columns=10).size == (58, 4)


def test_impossible_grids():
    for images in (np.zeros((1, 4, 4, 3)), noise(0, 4, 4, 3), noise(4, 4, 3)):
        with advises("is not possible. Use uint8 [N, H, W, C] with N at least 1."):
            make_grid(images)
    with advises("columns=0: not possible. Use 1 or more."):
        make_grid(noise(1, 4, 4, 1), columns=0)
    with advises("scale=0: not possible. Use 1 or more."):
        make_grid(noise(1, 4, 4, 1), scale=0)
    assert make_grid(noise(1, 4, 4, 1), columns=1, scale=1).size == (4, 4)


def test_png_is_the_grid(tmp_path):
    images = noise(4, 8, 8, 3)
    for _ in range(2):  # an older one is replaced
        save_images(images, np.arange(4), tmp_path / "new" / "a.png")
    with Image.open(tmp_path / "new" / "a.png") as image:
        assert (np.asarray(image) == np.asarray(make_grid(images, scale=8))).all()  # to be seen
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.png"]


def test_npz_round_trip(tmp_path):
    images, labels = noise(4, 8, 8, 3), np.array([0, 1, 1, 0], np.int32)
    save_images(images, labels, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as stored:
        assert sorted(stored) == ["images", "labels"]
        assert (stored["images"] == images).all()
        assert stored["labels"].dtype == np.int64
    assert (load_data(str(tmp_path / "a.npz"), resolution=None).images == images).all()
    save_images(images, None, tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz") as stored:
        assert sorted(stored) == ["images"]
    assert len(list(tmp_path.iterdir())) == 2


def test_image_folder_round_trip(tmp_path):
    images, labels = noise(24, 8, 8, 1), np.tile(np.arange(12), 2)
    save_images(images, labels, tmp_path / "out")
    assert (tmp_path / "out" / "03" / "000001.png").exists()
    loaded = load_data(str(tmp_path / "out"), resolution=None)
    assert loaded.labels is not None
    assert loaded.labels.tolist() == sorted(labels)
    assert (loaded.images == images[np.argsort(labels, kind="stable")]).all()
    save_images(images[:2], np.array([3, 7]), tmp_path / "few")
    assert (tmp_path / "few" / "7" / "000000.png").exists()


def test_a_folder_without_labels_is_flat(tmp_path):
    images = noise(3, 8, 8, 3)
    (tmp_path / "v1.5").mkdir()  # an empty folder may be filled, whatever its name
    save_images(images, None, tmp_path / "v1.5")
    assert sorted(path.name for path in (tmp_path / "v1.5").iterdir()) == [f"00000{i}.png" for i in range(3)]
    assert (load_data(str(tmp_path / "v1.5"), resolution=None).images == images).all()


def test_existing_and_ambiguous_outputs_raise(tmp_path):
    images = noise(2, 8, 8, 1)
    save_images(images, None, tmp_path / "out")
    (tmp_path / "file").write_text("precious")
    assert "cannot be written" in error_message(save_images, images, None, tmp_path / "file" / "a.png")
    for labels in (np.arange(3), np.zeros(2), np.array([-1, 0])):
        with advises("is not possible. Use [2] integers from 0 on."):
            save_images(images, labels, tmp_path / "b.npz")
    assert not (tmp_path / "b.npz").exists()
    save_images(images, np.array([0, 7]), tmp_path / "b.npz")


OUTPUT_CASES = [
    Case(
        "sample RUN --count=1 --out=NEW/a.gif",
        "--out=NEW/a.gif: unknown extension .gif. Use grid.png, samples.npz, or a folder (a name without extension).",
        ("--out=NEW/grid.png", "--out=NEW/samples.npz", "--out=NEW/folder"),
    ),
    Case(
        "sample RUN --count=1 --out=NEW/file",
        "--out=NEW/file: this is a file. Use grid.png, samples.npz, or a folder (a name without extension).",
        ("--out=NEW/grid.png", "--out=NEW/samples.npz", "--out=NEW/folder"),
    ),
    Case(
        "sample RUN --count=1 --out=DIR/folder", "the folder is not empty. Name a new one.", ("--out=NEW/new_folder",)
    ),
]


@pytest.mark.parametrize("case", OUTPUT_CASES, ids=case_id)
def test_other_outputs_are_used_as_advised(case, check_advice, tmp_path):
    (tmp_path / "file").write_text("precious")
    check_advice(case)


def test_images_of_five_channels_are_saved_as_advised(tmp_path):
    images = noise(2, 8, 8, 5)
    with advises("files hold 1, 3 or 4 channels, not 5. Use samples.npz."):
        save_images(images, None, tmp_path / "out")
    save_images(images, None, tmp_path / "samples.npz")
    assert (load_data(str(tmp_path / "samples.npz"), resolution=8, channels=5).images == images).all()


@pytest.mark.parametrize("name", ["a.txt", "folder"])
def test_arrays_of_numbers_are_saved_as_advised(name, tmp_path):
    x = RNG.normal(size=(4, 2)).astype(np.float32)

    def save(out):
        save_arrays(x, None, tmp_path / out, lambda: noise(8, 8, 3))

    with advises("not possible for arrays of numbers. Use samples.npz or picture.png."):
        save(name)
    save("samples.npz")
    save("picture.png")
    assert (load_data(str(tmp_path / "samples.npz"), resolution=None).images == x).all()
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.size == (8, 8)


def test_waves_are_saved_as_advised(tmp_path):
    waves = RNG.uniform(-1, 1, (3, 2, 40)).astype(np.float32)

    def save(out, labels=None, classes=()):
        save_arrays(waves, labels, tmp_path / out, lambda: noise(8, 8, 3), classes, 8000)

    with advises(
        f"--out={tmp_path}/a.wav: not possible for waves. "
        "Use a folder (a name without extension), samples.npz, or picture.png."
    ):
        save("a.wav")
    save("samples.npz")
    save("picture.png")
    save("waves", np.array([1, 0, 1]), ("no", "yes"))
    names = sorted(str(path.relative_to(tmp_path / "waves")) for path in (tmp_path / "waves").glob("*/*"))
    assert names == ["no/000000.wav", "yes/000000.wav", "yes/000001.wav"]
    last = read_wav(tmp_path / "waves" / "yes" / "000001.wav", 10_000)
    assert last
    assert last.sample_rate == 8000
    np.testing.assert_allclose(last.samples, waves[2], atol=1 / 32768)
    (tmp_path / "file").touch()
    assert "this is a file. Use a folder (a name" in error_message(save, "file")
    assert "is not empty. Name a new one" in error_message(save, "waves")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    images = noise(2, 8, 8, 1)
    save_images(images, None, tmp_path / "a.npz")
    before = (tmp_path / "a.npz").read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert "No space left on device" in error_message(save_images, images[:1], None, tmp_path / "a.npz")
    assert (tmp_path / "a.npz").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
