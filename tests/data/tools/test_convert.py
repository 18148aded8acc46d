"""Whatever a set is written as, it loads again as the same images and labels in the same order."""

import gc
import io
import json
import tarfile
import warnings
import zipfile
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pytest
import webdataset
from PIL import Image

from advice import advises
from paragan.core.errors import UsageError
from paragan.data.dataset import Dataset, load_data
from paragan.data.open_source import open_source
from paragan.data.tools.convert import ConvertOptions, ConvertResult, convert
from paragan.data.tools.reindex import reindex
from paragan.data.tools.writers import choose_format, folder_names, sanitize_name

RNG = np.random.default_rng(0)
NAMES = {"folder": "set", "npz": "set.npz", "zip": "set.zip", "h5": "set.h5", "tars": "shards"}


def noise(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


def put(path: Path, pixels: np.ndarray | None = None, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(8, 8, 3) if pixels is None else pixels).save(path, **options)
    return path


def written(where, out: Path, form: str | None = None, *, shard_mb: float = 64, finish=None, **target) -> ConvertResult:
    return convert(
        open_source(str(where)), out, choose_format(out, form, shard_mb), ConvertOptions(**target), finalize=finish
    )


def same(one: Dataset, other: Dataset) -> bool:
    labels = [result.labels if result.labels is None else result.labels.tolist() for result in (one, other)]
    return np.array_equal(one.images[:], other.images[:]) and labels[0] == labels[1] and one.classes == other.classes


def usage_message(*args, **options) -> str:
    with pytest.raises(UsageError) as caught:
        written(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module", params=[1, 3], ids=["grey", "rgb"])
def start(request, tmp_path_factory) -> Path:
    """Twenty images of three classes in order, of which one has no image."""
    labels = np.sort(np.append(RNG.integers(0, 2, 18) * 2, [0, 2]))
    path = tmp_path_factory.mktemp("start") / "start.npz"
    np.savez(path, images=noise(20, 8, 8, request.param), labels=labels, classes=np.array(["ant", "bee", "cat"]))
    return path


# Round trips ------------------------------------------------------------------------------------------------

KEEPS_ALL = [form for form in NAMES if form != "folder"]


@pytest.mark.parametrize("first", KEEPS_ALL)
@pytest.mark.parametrize("second", KEEPS_ALL)
def test_any_format_and_any_other_hold_the_same(first, second, start, tmp_path):
    target = load_data(str(start), resolution=None)
    for source, form, out in ((start, first, tmp_path / "1"), (tmp_path / "1" / NAMES[first], second, tmp_path / "2")):
        written(source, out / NAMES[form], form)
        assert same(load_data(str(out / NAMES[form]), resolution=None), target)


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("labels", [True, False])
def test_to_a_folder_and_back(form, labels, tmp_path):
    images = noise(20, 8, 8, 3)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(20) // 5)
    written(tmp_path / "a.npz", tmp_path / "folder", labels=labels)
    written(tmp_path / "folder", tmp_path / NAMES[form], form)
    assert same(
        load_data(str(tmp_path / NAMES[form]), resolution=None),
        load_data(str(tmp_path / "a.npz"), resolution=None, labels=labels),
    )


@pytest.mark.parametrize("form", NAMES)
def test_a_single_image(form, tmp_path):
    put(tmp_path / "from" / "only" / "a.png")
    written(tmp_path / "from", tmp_path / NAMES[form], form)
    assert same(
        load_data(str(tmp_path / NAMES[form]), resolution=None), load_data(str(tmp_path / "from"), resolution=None)
    )


@pytest.mark.parametrize("form", ["npz", "h5"])
def test_pixels_of_one_size_stay_whatever_it_is(form, tmp_path):
    images = noise(5, 28, 28, 1)
    np.savez(tmp_path / "a.npz", images=images)
    assert written(tmp_path / "a.npz", tmp_path / f"b.{form}").shape == (28, 28, 1)
    assert (load_data(str(tmp_path / f"b.{form}"), resolution=28).images == images).all()


def test_a_folder_has_its_images_class_by_class_each_in_their_order(tmp_path):
    images, labels = noise(20, 8, 8, 1), RNG.integers(0, 3, 20)
    labels[:3] = 0, 1, 2
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    assert "class by class" in written(tmp_path / "a.npz", tmp_path / "b").notes[0]
    result, order = load_data(str(tmp_path / "b"), resolution=None), np.argsort(labels, kind="stable")
    assert (result.images[:] == images[order]).all()
    assert result.labels is not None
    assert (result.labels == labels[order]).all()


# Files as they are ------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path) -> Path:
    exif = Image.Exif()
    exif[0x0112] = 6
    put(tmp_path / "files" / "a" / "1.jpg", noise(20, 12, 3), exif=exif)
    put(tmp_path / "files" / "a" / "2.png", noise(16, 16))
    put(tmp_path / "files" / "b" / "1.webp", noise(9, 9, 3))
    put(tmp_path / "files" / "b" / "2.bmp", noise(7, 8, 3))
    put(tmp_path / "files" / "b" / "3.png", noise(8, 8, 4))
    return tmp_path / "files"


@pytest.mark.parametrize("form", ["folder", "zip", "tars"])
def test_files_are_copied_byte_for_byte(form, files, tmp_path):
    written(files, tmp_path / NAMES[form], form)
    one, other = open_source(str(files)), open_source(str(tmp_path / NAMES[form]))
    assert [one.read(i) for i in range(5)] == [other.read(i) for i in range(5)]


@pytest.mark.parametrize("form", ["folder", "zip", "tars", "npz", "h5"])
def test_resized_images_equal_those_of_training(form, files, tmp_path):
    written(files, tmp_path / NAMES[form], form, resolution=16)
    assert same(load_data(str(tmp_path / NAMES[form]), resolution=None), load_data(str(files), resolution=16))


def test_only_images_of_another_encoding_are_re_encoded(files, tmp_path):
    written(files, tmp_path / "png", encoding="png")
    written(files, tmp_path / "jpg", encoding="jpg")
    one, png, jpg = (open_source(str(where)) for where in (files, tmp_path / "png", tmp_path / "jpg"))
    assert [png.read(i) == one.read(i) for i in range(5)] == [False, True, False, False, True]
    assert [jpg.read(i) == one.read(i) for i in range(5)] == [True, False, False, False, False]
    for i, size in enumerate([(20, 12), (16, 16), (9, 9), (8, 7), (8, 8)]):
        record = png.read(i)
        assert isinstance(record, bytes)
        with Image.open(io.BytesIO(record)) as image:
            assert image.size == (size if i else (20, 12))  # upright, and no more to be turned
            assert image.getexif().get(0x0112) is None
    assert same(load_data(str(files), resolution=8), load_data(str(tmp_path / "png"), resolution=8))


def test_quality_is_that_of_jpeg(tmp_path):
    put(tmp_path / "from" / "a.png", noise(64, 64, 3))
    sizes = []
    for quality in (20, 95):
        written(tmp_path / "from", tmp_path / str(quality), encoding="jpg", quality=quality)
        sizes.append((tmp_path / str(quality) / "00000000.jpg").stat().st_size)
    assert sizes[0] < sizes[1]


# As others read them ----------------------------------------------------------------------------------------


def test_a_zip_is_one_of_stylegan_and_edm(start, tmp_path):
    written(start, tmp_path / "a.zip")
    target = load_data(str(start), resolution=None)
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        labels = dict(json.loads(archive.read("dataset.json"))["labels"])
        names = sorted(name for name in archive.namelist() if name.endswith(".png"))
        assert names == [f"00000/img{i:08d}.png" for i in range(20)]
        assert [labels[name] for name in names] == target.labels.tolist()  # pyright: ignore
        for name, pixels in zip(names, target.images):
            with archive.open(name) as file, Image.open(file) as image:
                assert (np.asarray(image).reshape(pixels.shape) == pixels).all()
    written(start, tmp_path / "b.zip", labels=False)
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        assert json.loads(archive.read("dataset.json")) == {"labels": None}


def test_an_h5_is_one_of_biggan(start, tmp_path):
    written(start, tmp_path / "a.h5")
    target = load_data(str(start), resolution=None)
    with h5py.File(tmp_path / "a.h5") as file:
        assert (file["imgs"][:] == target.images[:].transpose(0, 3, 1, 2)).all()  # pyright: ignore
        assert (file["labels"][:] == target.labels).all()  # pyright: ignore


def test_an_npz_is_one_of_numpy(start, tmp_path):
    written(start, tmp_path / "a.npz")
    with np.load(start) as one, np.load(tmp_path / "a.npz") as other:
        assert sorted(one) == sorted(other)
        assert all(np.array_equal(one[key], other[key]) for key in one)


def test_shards_are_read_by_webdataset(start, tmp_path):
    written(start, tmp_path / "out", "tars", shard_mb=0.01)
    shards = sorted(str(path) for path in (tmp_path / "out").glob("*.tar"))
    assert len(shards) > 1
    assert all(Path(shard).stat().st_size <= 20_480 for shard in shards)  # tars are padded to 10,240
    target = load_data(str(start), resolution=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves files open
        read = list(webdataset.WebDataset(shards, shardshuffle=False).decode("pil").to_tuple("png", "cls"))
        gc.collect()
    assert [label for _, label in read] == target.labels.tolist()  # pyright: ignore
    depth = "L" if target.images.shape[3] == 1 else "RGB"
    pixels = np.stack([np.asarray(image.convert(depth)).reshape(target.images.shape[1:]) for image, _ in read])
    assert (pixels == target.images[:]).all()
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["ant", "bee", "cat"]


@pytest.mark.parametrize("form", ["npz", "zip", "tars"])
def test_equal_sets_become_equal_bytes(form, start, tmp_path):
    for name in ("1", "2"):
        written(start, tmp_path / name / NAMES[form], form, shuffle=3)
    result = [sorted(path for path in (tmp_path / name).rglob("*") if path.is_file()) for name in ("1", "2")]
    assert [path.read_bytes() for path in result[0]] == [path.read_bytes() for path in result[1]]


def test_files_in_shards_are_nobodys_and_of_no_time(start, tmp_path):
    written(start, tmp_path / "out", "tars")
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in tar.getmembers()} == {(0, 0, 0, "", "")}


def test_shuffling_is_another_order_of_the_same(start, tmp_path):
    written(start, tmp_path / "a.npz", shuffle=1)
    written(start, tmp_path / "b.npz", shuffle=2)
    plain, one, other = (
        load_data(str(path), resolution=None) for path in (start, tmp_path / "a.npz", tmp_path / "b.npz")
    )

    def pairs(result: Dataset) -> list[tuple[bytes, int]]:
        assert result.labels is not None
        return [(image.tobytes(), label) for image, label in zip(result.images, result.labels.tolist())]

    assert sorted(pairs(plain)) == sorted(pairs(one)) == sorted(pairs(other))
    assert pairs(plain) != pairs(one) != pairs(other)


# Indexes ----------------------------------------------------------------------------------------------------


def test_an_index_is_rebuilt(start, tmp_path):
    written(start, tmp_path / "out", "tars", shard_mb=0.01, finish=lambda folder: reindex(str(folder)))
    stored = tmp_path / "out" / "paragan-index.npz"
    first = stored.read_bytes()
    stored.write_bytes(b"damaged")
    index, where = reindex(str(tmp_path / "out"))
    assert (len(index), where, stored.read_bytes()) == (20, stored, first)
    reindex(str(tmp_path / "out" / "shard-*.tar"), tmp_path / "elsewhere.npz")
    assert (tmp_path / "elsewhere.npz").read_bytes() == first
    one, _ = reindex(str(tmp_path / "out" / "shard-000000.tar"), tmp_path / "one.npz")
    assert 0 < len(one) < 20


def test_what_are_no_shards_has_no_index(start, tmp_path):
    with pytest.raises(UsageError, match=r"holds no \.tar"):
        reindex(str(tmp_path))
    with advises(f"data: {start} is not a .tar. Give a folder of tars, or such as shards/shard-*.tar"):
        reindex(str(start))
    with advises(f"data: {tmp_path / 'shards'} does not exist. Give a folder of tars, or such as shards/shard-*.tar"):
        reindex(str(tmp_path / "shards"))
    written(start, tmp_path / "shards", "tars")
    for advised in ("shards", "shards/shard-*.tar"):
        assert len(reindex(str(tmp_path / advised))[0]) == 20


def test_the_index_of_remote_shards_is_put_where_advised(start, tmp_path):
    written(start, tmp_path / "shards", "tars")
    files = fsspec.filesystem("memory")
    files.put(f"{tmp_path}/shards/", "memory://index/shards/", recursive=True)
    with advises(
        "memory://index/shards: is remote and cannot be written. Give --out paragan-index.npz, and put it into the "
        "folder of the tars"
    ):
        reindex("memory://index/shards")
    reindex("memory://index/shards", tmp_path / "paragan-index.npz")
    files.put(f"{tmp_path}/paragan-index.npz", "memory://index/shards/paragan-index.npz")
    assert open_source("memory://index/shards").notes[0].startswith("1 shard; index of memory://index/shards")


# Complete, or not at all ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", NAMES)
def test_a_bad_image_is_refused_and_no_file_remains(form, tmp_path):
    put(tmp_path / "from" / "a.png")
    (tmp_path / "from" / "b.png").write_bytes(b"no image")
    put(tmp_path / "from" / "c.png")
    message = usage_message(tmp_path / "from", tmp_path / NAMES[form], form)
    assert "b.png cannot be decoded" in message
    assert "--skip-bad" in message
    assert left(tmp_path) == ["from"]


@pytest.mark.parametrize("form", NAMES)
def test_bad_ones_are_left_out_and_listed(form, tmp_path):
    for name in ("a", "b"):
        for index in range(3):
            put(tmp_path / "from" / name / f"{index}.png")
    expected = load_data(str(tmp_path / "from"), resolution=None)
    (tmp_path / "from" / "a" / "1.png").write_bytes(b"no image")
    out = tmp_path / NAMES[form]
    assert written(tmp_path / "from", out, form, skip_bad=True).count == 5
    result, rows = load_data(str(out), resolution=None), [0, 2, 3, 4, 5]
    assert (result.images[:] == expected.images[rows]).all()
    assert result.labels.tolist() == [0, 0, 1, 1, 1]  # pyright: ignore
    (line,) = (tmp_path / f"{out.name}.bad.txt").read_text().splitlines()
    assert line.startswith(str(tmp_path / "from" / "a" / "1.png") + "\t")


@pytest.mark.parametrize("form", NAMES)
def test_an_interruption_leaves_no_file(form, start, tmp_path):
    def interrupt(done: int, count: int) -> None:
        if done >= 8:
            raise KeyboardInterrupt

    out = tmp_path / NAMES[form]
    with pytest.raises(KeyboardInterrupt):
        convert(
            open_source(str(start)), out, choose_format(out, form), ConvertOptions(labels=False), progress=interrupt
        )
    assert left(tmp_path) == []


@pytest.mark.parametrize("form", NAMES)
def test_existing_files_are_not_overwritten(form, start, tmp_path):
    out = tmp_path / NAMES[form]
    out.write_text("precious")
    assert "exists already" in usage_message(start, out, form)
    assert out.read_text() == "precious"


def test_an_unwritable_output_is_refused_before_reading(start, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in usage_message(start, tmp_path / "file" / "a.npz")


def test_a_set_without_valid_images_is_refused(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a.png").write_bytes(b"")
    assert "none of the 1 images" in usage_message(tmp_path / "from", tmp_path / "a.zip", skip_bad=True)
    assert left(tmp_path) == ["from"]


def test_a_folder_cannot_store_an_empty_class(start, tmp_path):
    with advises("data: class 'bee' has no image, which a folder cannot store. Use .npz or --no-labels"):
        written(start, tmp_path / "out")
    assert written(start, tmp_path / "out.npz").count == 20
    assert written(start, tmp_path / "out", labels=False).count == 20


def test_formats_that_are_not_written(start, tmp_path):
    with advises(
        "a.tgz: ends in .tgz, which is not a supported format. Use a folder (a name without extension), .npz, .zip, "
        ".h5, or --to tars"
    ):
        written(start, tmp_path / "a.tgz")
    for name, form in (("a.npz", None), ("a.zip", None), ("a.h5", None), ("a", "tars"), ("a.tgz", "tars")):
        assert written(start, tmp_path / name, form).count == 20
    assert written(start, tmp_path / "folder", labels=False).count == 20
    assert written(start, tmp_path / "v1.5", "zip").count == 20


def test_impossible_wishes():
    for wrong in (0, 101):
        with advises(f"--quality={wrong}: out of range. Use 1 to 100, such as 95."):
            ConvertOptions(quality=wrong)
    assert [ConvertOptions(quality=quality).quality for quality in (1, 95, 100)] == [1, 95, 100]
    for wrong in (-1, 2**63):
        with advises(f"--shuffle={wrong}: not a seed. Use 0 or more, and less than 2^63."):
            ConvertOptions(shuffle=wrong)
    assert [ConvertOptions(shuffle=seed).shuffle for seed in (0, 2**63 - 1)] == [0, 2**63 - 1]
    with pytest.raises(UsageError, match="--resolution=0"):
        ConvertOptions(resolution=0)


# Names of classes -------------------------------------------------------------------------------------------

NASTY = (
    "../x",
    "a/b",
    "a\\b",
    "",
    ".",
    "..",
    ".hidden",
    "/etc",
    "a\0b",
    "x" * 500,
    "é" * 200,
    "CON:",
    "a. ",
    "line\nbreak",
)


@pytest.mark.parametrize("name", NASTY)
def test_a_plain_name_is_one_visible_folder(name, tmp_path):
    plain = sanitize_name(name)
    assert plain
    assert not plain.startswith(".")
    (tmp_path / plain).mkdir()
    assert left(tmp_path) == [plain]


@pytest.mark.parametrize("names", [("b", "a"), ("a", "a"), ("a/", "a_"), ("A", "a"), NASTY, tuple(map(str, range(12)))])
def test_folders_are_different_and_in_the_order_of_labels(names):
    folders = folder_names(names)
    assert folders == sorted(folders)
    assert len({folder.casefold() for folder in folders}) == len(names)


def test_good_names_stay():
    assert folder_names(["ant", "bee", "zebra"]) == ["ant", "bee", "zebra"]
    assert folder_names([str(i) for i in range(10)]) == [str(i) for i in range(10)]
    assert folder_names([str(i) for i in range(11)])[:2] == ["00", "01"]
    assert folder_names(["b", "a"]) == ["0-b", "1-a"]


def test_no_class_leads_out_of_the_folder(tmp_path):
    labels = np.arange(len(NASTY) - 1)
    classes = np.array([name for name in NASTY if "\0" not in name])
    np.savez(tmp_path / "a.npz", images=noise(len(labels), 8, 8, 1), labels=labels, classes=classes)
    written(tmp_path / "a.npz", tmp_path / "deep" / "out")
    assert left(tmp_path) == ["a.npz", "deep"]
    assert left(tmp_path / "deep") == ["out"]
    result = load_data(str(tmp_path / "deep" / "out"), resolution=None)
    assert (result.images[:] == load_data(str(tmp_path / "a.npz"), resolution=None).images).all()
    assert (result.labels == labels).all()


def test_odd_images_stay_what_training_sees(tmp_path):
    odd, turned = tmp_path / "odd set", Image.Exif()
    turned[0x0112] = 6
    deep, frames = RNG.integers(0, 65536, (16, 16), np.uint16), [Image.fromarray(noise(16, 16, 3)) for _ in range(3)]
    for name in ("a b", "ü✓\nx"):
        (odd / name).mkdir(parents=True)
    Image.fromarray(deep).save(odd / "a b" / "deep 16.png")
    Image.fromarray(noise(16, 20, 3)).convert("CMYK").save(odd / "a b" / "ink\nand.jpg")
    for name in ("turned.jpg", "turned.png", "turned.webp"):
        Image.fromarray(noise(16, 24, 3)).save(odd / "a b" / name, exif=turned)
    for name in ("moving.webp", "moving.png"):
        frames[0].save(odd / "ü✓\nx" / name, save_all=True, append_images=frames[1:])
    frames[1].quantize(8).save(odd / "ü✓\nx" / "palette.png", transparency=3)
    for height, width in ((1, 1), (1, 5000), (5000, 1)):
        Image.fromarray(noise(height, width, 3)).save(odd / "ü✓\nx" / f"{height}x{width}.png")
    for form in ("npz", "h5", "zip", "folder", "tars"):
        for options in ({"resolution": 16}, {"encoding": "png"}, {}):
            if form in ("npz", "h5") and "resolution" not in options:
                continue
            out = tmp_path / "-".join(options) / NAMES[form]
            written(odd, out, form, **options)
            remote = load_data(str(out), resolution=16, channels=3)
            np.testing.assert_array_equal(remote.images, load_data(str(odd), resolution=16, channels=3).images)
            assert remote.labels is not None
            assert remote.labels.tolist() == [0] * 5 + [1] * 6
