"""Images that are not plain 8-bit: which pixels training sees of them, and what is said."""

import dataclasses
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pytest
from PIL import Image

from advice import advises
from paragan.config.resolve import load_dataset, resolve
from paragan.core.errors import UsageError
from paragan.data.dataset import DEEP_SAMPLE, load_data
from paragan.data.decode import ImageDecoder
from paragan.data.loader.decode_worker import DecodeWorker
from paragan.data.loader.shared_memory import SharedArena
from paragan.data.open_source import open_source
from paragan.data.storage.filesystem import RemoteOptions
from paragan.data.tools.convert import ConvertOptions, convert
from paragan.data.tools.inspect_dataset import inspect_dataset
from paragan.data.tools.writers import choose_format
from paragan.data.value_range import ValueRange, parse_range
from tiny_run import make_run

RNG = np.random.default_rng(0)
SIDE = 8
RAMP = np.linspace(0, 1, SIDE * SIDE).reshape(SIDE, SIDE)  # 0..1
BITS_8 = (RAMP * 255).astype(np.uint8)
BITS_12 = (RAMP * 4095).astype(np.uint16)
BITS_16 = (RAMP * 65535).astype(np.uint16)
COLOR_12 = RNG.integers(0, 4096, (SIDE, SIDE, 3)).astype(np.uint16)
COLOR_12[0, 0] = 4095
UINT16 = 3  # types of fields of TIFF
UINT32 = 4


ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))


def png16(values: np.ndarray, transparent: bytes = b"", *, interlaced: bool = False) -> bytes:
    """A PNG of 16 bits: values [H, W, C], C 1 (grey), 2 (with alpha), 3 (RGB), 4 (with alpha); rows filtered by Sub."""
    height, width, channels = values.shape
    parts = [values[y::dy, x::dx] for y, x, dy, dx in ADAM7] if interlaced else [values]
    data = b""
    for part in parts:
        rows = np.ascontiguousarray(part, ">u2").reshape(len(part), -1).view(np.uint8)  # [h, bytes]
        before = np.pad(rows, ((0, 0), (2 * channels, 0)))[:, : rows.shape[1]]
        data += np.concatenate([np.ones((len(part), 1), np.uint8), rows - before], axis=1).tobytes()

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    color_type = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, interlaced)
    transparency = chunk(b"tRNS", transparent) if transparent else b""
    chunks = chunk(b"IHDR", header) + transparency + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def tiff(
    values: np.ndarray, photometric: int, *, order: str = "<", deflate: bool = False, strips: int = 1, **tags: int
) -> bytes:
    """A TIFF of values [H, W] or [H, W, C] in some strips; `tags` are named t<number>."""
    height, width = values.shape[:2]
    channels = 1 if values.ndim == 2 else values.shape[2]
    parts = [part.astype(part.dtype.newbyteorder(order)).tobytes() for part in np.split(values, strips)]
    parts = [zlib.compress(part) for part in parts] if deflate else parts
    data = b"".join(parts) + b"\0" * (sum(map(len, parts)) % 2)
    starts = [8 + sum(map(len, parts[:index])) for index in range(strips)]
    fields: dict[int, tuple[str, list[int]]] = {  # tag: type of its values, values
        256: ("I", [width]),
        257: ("I", [height]),
        258: ("H", [8 * values.itemsize] * channels),
        259: ("H", [8 if deflate else 1]),
        262: ("H", [photometric]),
        273: ("I", starts),
        277: ("H", [channels]),
        278: ("I", [height // strips]),
        279: ("I", [*map(len, parts)]),
        339: ("H", [{"u": 1, "i": 2, "f": 3}[values.dtype.kind]]),
    }
    fields |= {int(name[1:]): ("H", [value]) for name, value in tags.items()}
    entries = b""
    for tag, (kind, numbers) in sorted(fields.items()):
        packed = struct.pack(f"{order}{len(numbers)}{kind}", *numbers)
        if len(packed) > 4:
            data += packed
            packed = struct.pack(f"{order}I", 8 + len(data) - len(packed))
        field_type = {"H": UINT16, "I": UINT32}[kind]
        entries += struct.pack(f"{order}HHI", tag, field_type, len(numbers)) + packed.ljust(4, b"\0")
    magic = b"II*\0" if order == "<" else b"MM\0*"
    directory = struct.pack(f"{order}H", len(fields)) + entries + b"\0\0\0\0"
    return magic + struct.pack(f"{order}I", 8 + len(data)) + data + directory


def encode(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def palette_image() -> Image.Image:
    image = Image.fromarray((np.arange(64, dtype=np.uint8) % 3).reshape(SIDE, SIDE))
    image.putpalette([255, 0, 0, 0, 255, 0, 9, 9, 9])
    return image


PALETTE_COLORS = np.array([[255, 0, 0], [0, 255, 0], [9, 9, 9]], np.uint8)[np.arange(64) % 3].reshape(SIDE, SIDE, 3)
HALF = np.where(np.arange(SIDE) < 4, 65535, 0).astype(np.uint16) * np.ones((SIDE, 1), np.uint16)  # opaque, transparent


def with_alpha(values: np.ndarray) -> np.ndarray:
    return np.concatenate([values.reshape(SIDE, SIDE, -1), HALF[..., None]], axis=2)


def on_white(pixels: np.ndarray) -> np.ndarray:
    return np.where(HALF[..., None] > 0, pixels.reshape(SIDE, SIDE, -1), 255)


def frames(form: str, **options) -> bytes:
    first, second = Image.fromarray(BITS_8), Image.fromarray(BITS_8.T.copy())
    if form == "GIF":
        first, second = first.convert("P"), second.convert("P")
    return encode(first, form, save_all=True, append_images=[second], **options)


CMYK_8 = RNG.integers(0, 256, (SIDE, SIDE, 4)).astype(np.uint8)
CMYK_AS_RGB = np.asarray(Image.frombytes("CMYK", (SIDE, SIDE), CMYK_8.tobytes()).convert("RGB"))
SIGNED = (BITS_12.astype(np.int16) - 1000).astype(np.int16)

# name -> (file, data.range, expected pixels)
FILES: dict[str, tuple[bytes, str, np.ndarray]] = {
    "12-grey.png": (encode(Image.fromarray(BITS_12), "PNG"), "auto", BITS_12 >> 4),
    "16-grey.png": (encode(Image.fromarray(BITS_16), "PNG"), "auto", BITS_16 >> 8),
    "12-full.png": (encode(Image.fromarray(BITS_12), "PNG"), "full", BITS_12 >> 8),
    "8-in-16.png": (encode(Image.fromarray(BITS_8.astype(np.uint16)), "PNG"), "auto", BITS_8),
    "10-bit.png": (encode(Image.fromarray(BITS_12 >> 2), "PNG"), "auto", BITS_12 >> 4),
    "14-bit.png": (encode(Image.fromarray(BITS_16 >> 2), "PNG"), "auto", BITS_16 >> 8),
    "window.png": (
        encode(Image.fromarray(BITS_12), "PNG"),
        "1000:3000",
        np.rint((BITS_12.astype(float) - 1000).clip(0, 2000) * 255 / 2000),
    ),
    "12-rgb.png": (png16(COLOR_12), "auto", COLOR_12 >> 4),
    "12-rgb-interlaced.png": (png16(COLOR_12, interlaced=True), "auto", COLOR_12 >> 4),
    "12-grey-interlaced.png": (png16(BITS_12[..., None], interlaced=True), "auto", BITS_12 >> 4),
    "12-rgba.png": (png16(with_alpha(COLOR_12)), "auto", on_white(COLOR_12 >> 4)),
    "12-grey-alpha.png": (png16(with_alpha(BITS_12)), "auto", on_white(BITS_12 >> 4)),
    "12-grey-key.png": (
        png16(BITS_12[..., None], struct.pack(">H", 4095)),
        "auto",
        np.where(BITS_12 == 4095, 255, BITS_12 >> 4),
    ),
    "12-rgb-key.png": (
        png16(COLOR_12, struct.pack(">3H", *COLOR_12[3, 3])),
        "auto",
        np.where((COLOR_12[3, 3] == COLOR_12).all(axis=2, keepdims=True), 255, COLOR_12 >> 4),
    ),
    "masks.png": (encode(Image.fromarray((BITS_8 > 99).astype(np.uint8)), "PNG"), "0:1", 255 * (BITS_8 > 99)),
    "masks.jpg": (
        encode(Image.fromarray(np.full((8, 8), 100, np.uint8)), "JPEG"),
        "50:150",
        np.full((8, 8), 128),
    ),
    "8-bit.png": (encode(Image.fromarray(BITS_8), "PNG"), "0:4095", BITS_8),  # cannot hold this range: as they are
    "12-grey.tif": (encode(Image.fromarray(BITS_12), "TIFF"), "auto", BITS_12 >> 4),
    "12-grey-lzw.tif": (encode(Image.fromarray(BITS_12), "TIFF", compression="tiff_lzw"), "auto", BITS_12 >> 4),
    "12-grey-big.tif": (tiff(BITS_12, 1, order=">"), "auto", BITS_12 >> 4),
    "12-rgb.tif": (tiff(COLOR_12, 2), "auto", COLOR_12 >> 4),
    "12-rgb-big.tif": (tiff(COLOR_12, 2, order=">"), "auto", COLOR_12 >> 4),
    "12-rgb-strips.tif": (tiff(COLOR_12, 2, strips=4), "auto", COLOR_12 >> 4),
    "12-rgb-deflate-strips.tif": (tiff(COLOR_12, 2, strips=4, deflate=True), "auto", COLOR_12 >> 4),
    "12-grey-strips.tif": (tiff(BITS_12, 1, strips=2), "auto", BITS_12 >> 4),
    "12-rgb-deflate.tif": (tiff(COLOR_12, 2, deflate=True), "auto", COLOR_12 >> 4),
    "12-rgb-deflate-big.tif": (tiff(COLOR_12, 2, deflate=True, order=">"), "auto", COLOR_12 >> 4),
    "12-rgba.tif": (tiff(with_alpha(COLOR_12), 2, t338=2), "auto", on_white(COLOR_12 >> 4)),
    "12-turned.tif": (tiff(BITS_12, 1, t274=6), "auto", np.rot90(BITS_12 >> 4, -1)),
    "12-rgb-turned.tif": (tiff(COLOR_12, 2, t274=6), "auto", np.rot90(COLOR_12 >> 4, -1)),
    "8-turned.tif": (tiff(BITS_8, 1, t274=8), "auto", np.rot90(BITS_8)),
    "signed.tif": (tiff(SIGNED, 1), "-1000:3095", np.rint(BITS_12 * 255.0 / 4095)),
    "32-bit.tif": (encode(Image.fromarray(BITS_12.astype(np.int32)), "TIFF"), "auto", BITS_12 >> 4),
    "float-0-1.tif": (
        encode(Image.fromarray((BITS_8 / 255).astype(np.float32)), "TIFF"),
        "auto",
        BITS_8,
    ),
    "float-1-1.tif": (
        encode(Image.fromarray((BITS_8 / 127.5 - 1).astype(np.float32)), "TIFF"),
        "auto",
        BITS_8,
    ),
    "float-bytes.tif": (encode(Image.fromarray(BITS_8.astype(np.float32)), "TIFF"), "auto", BITS_8),
    "float-window.tif": (
        encode(Image.fromarray((RAMP * 10).astype(np.float32)), "TIFF"),
        "0:5",
        np.rint((RAMP * 10).astype(np.float32).astype(float).clip(0, 5) * 51),
    ),
    "palette.png": (encode(palette_image(), "PNG"), "auto", PALETTE_COLORS),
    "palette.tif": (encode(palette_image(), "TIFF"), "auto", PALETTE_COLORS),
    "palette-key.png": (
        encode(palette_image(), "PNG", transparency=2),
        "auto",
        np.where(PALETTE_COLORS == 9, 255, PALETTE_COLORS),
    ),
    "bits.tif": (encode(Image.fromarray(np.eye(SIDE, dtype=bool)), "TIFF"), "auto", 255 * np.eye(SIDE)),
    "bits-white-is-0.tif": (tiff(255 - BITS_8, 0), "auto", BITS_8),
    "cmyk.tif": (encode(Image.frombytes("CMYK", (SIDE, SIDE), CMYK_8.tobytes()), "TIFF"), "auto", CMYK_AS_RGB),
    "frames.gif": (frames("GIF"), "auto", BITS_8),
    "frames.png": (frames("PNG"), "auto", BITS_8),
    "frames.webp": (frames("WEBP", lossless=True), "auto", np.repeat(BITS_8[..., None], 3, axis=2)),
    "pages.tif": (frames("TIFF"), "auto", BITS_8),
}


def folder_of(folder: Path, files: dict[str, bytes]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return str(folder)


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_training_sees_these_pixels(tmp_path, name):
    data, value_range, expected = FILES[name]
    folder = folder_of(tmp_path / "set", {name: data})
    expected = expected.reshape(SIDE, SIDE, -1)
    for cache in ("memory", "stream"):
        (image,) = load_data(folder, resolution=None, value_range=value_range, cache=cache).images[:]
        np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("kind", ["npz", "npy", "h5", "zip", "tars", "server"])
def test_a_container_changes_no_pixel(tmp_path, kind):
    """12-bit values as an array, in an archive or on a server are the pixels of a folder of their PNGs."""
    values = np.stack([BITS_12, BITS_12[::-1], BITS_12.T])
    folder = folder_of(
        tmp_path / "set", {f"{i}.png": encode(Image.fromarray(v.copy()), "PNG") for i, v in enumerate(values)}
    )
    path: Path | str = tmp_path / {"zip": "a.zip", "tars": "tars"}.get(kind, f"a.{kind}")
    if kind == "npz":
        np.savez(path, images=values.astype(">u2"), labels=[0, 1, 1])
    elif kind == "npy":
        np.save(path, values.astype(np.int64))
    elif kind == "h5":
        with h5py.File(path, "w") as file:
            file["imgs"] = values[:, None].astype(">u2")
    elif kind == "server":
        path = "memory://range/set"
        fsspec.filesystem("memory").put(folder, "/range/set", recursive=True)
    else:
        convert(open_source(folder), path, choose_format(path, kind, 64), ConvertOptions())
    expected = load_data(folder, resolution=None)
    for cache in ("memory", "stream"):
        data = load_data(str(path), resolution=None, cache=cache, remote=RemoteOptions(cache_dir=""))
        np.testing.assert_array_equal(data.images[:], expected.images)
        assert data.value_range == ValueRange(0, 4095, clips=False)


@pytest.mark.parametrize(
    "options", [{}, {"resolution": 8}, {"encoding": "png"}, {"range": "0:2000"}, {"range": "full"}]
)
@pytest.mark.parametrize("form", ["folder", "zip", "npz", "h5", "tars"])
def test_a_conversion_shows_training_the_same_pixels(tmp_path, form, options):
    """Also where one image has the right size already and is the darkest, so that its own range would be smaller."""
    dark = png16(COLOR_12 // 64)
    files = {"a.png": dark, "b.tif": tiff(np.tile(COLOR_12, (2, 2, 1)), 2), "c.png": png16(COLOR_12 // 2)}
    folder = folder_of(tmp_path / "set", files | {"d.bmp": encode(Image.fromarray(BITS_8), "BMP")})
    value_range = options.get("range", "auto")
    out = tmp_path / {"folder": "out", "tars": "tars"}.get(form, f"out.{form}")
    stores_pixels = form in ("npz", "h5")
    if stores_pixels:
        options = {"resolution": 8} | {name: value for name, value in options.items() if name != "encoding"}
    convert(open_source(folder), out, choose_format(out, form, 64), ConvertOptions(**options))
    expected = load_data(folder, resolution=8, value_range=value_range)
    np.testing.assert_array_equal(load_data(str(out), resolution=8).images, expected.images)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float32])
@pytest.mark.parametrize("text", ["0:63", "0:255", "0:65535", "-50:50", "0:4294967295"])
def test_every_type_is_mapped_as_exact_numbers_are(dtype, text):
    values = np.arange(100, dtype=dtype)
    value_range = parse_range(text)
    assert isinstance(value_range, ValueRange)
    low, high = value_range.low, value_range.high
    expected = [int(min(255, max(0, round((v - low) * 255 / (high - low))))) for v in range(100)]
    if text in ("0:255", "0:65535", "0:4294967295") and dtype != np.float32:
        expected = [int(min(v, high)) * 256 // int(high + 1) for v in range(100)]
    assert value_range.to_uint8(values).tolist() == expected


# What `auto` finds, and what it refuses -----------------------------------------------------------------------


def npz(path: Path, images: np.ndarray) -> str:
    np.savez(path, images=images)
    return str(path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (BITS_12.astype(float) / 4095, "0:1"),
        (BITS_12.astype(np.float16) / 4095 * 2 - 1, "-1:1"),
        (BITS_8.astype(float), "0:255"),
        (BITS_12.astype(np.float32), "0:4095"),
        (BITS_12.astype(np.uint64), "0:4095"),
        (BITS_8.astype(np.int16) // 2, "0:255"),
        ((BITS_8 // 2).astype(np.int8), "0:255"),
        (BITS_16, "0:65535"),
    ],
)
def test_auto_finds_the_usual_ranges(tmp_path, values, expected):
    data = load_data(npz(tmp_path / "a.npz", values[None]), resolution=None)
    assert str(data.value_range) == expected
    assert f"{expected} becomes 0:255 (data.range=auto)" in data.describe().replace("\n  ", " ")


@pytest.mark.parametrize(
    ("values", "readings"),
    [
        (RAMP * 254.5, ["0:255", "0:254.5"]),
        (RAMP * 1.01, ["0:1", "0:1.01"]),
        (RAMP * 3000 - 1000, ["-1000:2000", "0:2000"]),
        (SIGNED, ["-1000:3095", "0:3095"]),
        (BITS_16.astype(np.int32) * 2, ["0:131070"]),
    ],
)
def test_what_could_mean_several_ranges_is_refused_and_each_reading_works(tmp_path, values, readings):
    path = npz(tmp_path / "a.npz", values[None])
    message = refusal(lambda: load_data(path, resolution=None))
    for reading in readings:
        assert f"--data.range={reading}" in message
        assert load_data(path, resolution=None, value_range=reading).images.max() >= 254


def test_floats_beside_integers_are_refused(tmp_path):
    files = {name: FILES[name][0] for name in ("float-0-1.tif", "12-grey.png")}
    folder = folder_of(tmp_path, files)
    with advises("data.range=auto: images of float32 and uint16 have no common range. Use images of one type"):
        load_data(folder, resolution=None)
    with advises("data.range=full: not possible for float32 and uint16. Use --data.range=0:4095, which was found"):
        load_data(folder, resolution=None, value_range="full")
    assert load_data(folder, resolution=None, value_range="0:4095").images.max() == 255
    for name in files:
        (Path(folder) / name).rename(tmp_path / "other")
        assert load_data(folder, resolution=None).images.max() == 255
        (tmp_path / "other").rename(Path(folder) / name)


def test_8_bit_images_beside_deeper_ones_stay_as_they_are(tmp_path):
    files = {name: FILES[name][0] for name in ("12-grey.png", "8-bit.png")}
    images = load_data(folder_of(tmp_path, files), resolution=None).images[..., 0]
    np.testing.assert_array_equal(images, [BITS_12 >> 4, BITS_8])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_named_with_their_file(tmp_path, bad):
    values = BITS_8.astype(np.float32) / 255
    values[3, 4] = bad
    files = {"a.tif": FILES["float-0-1.tif"][0], "b.tif": encode(Image.fromarray(values), "TIFF")}
    message = refusal(lambda: load_data(folder_of(tmp_path, files), resolution=None))
    assert f"{tmp_path / 'b.tif'} cannot be decoded: 1 of 64 values are NaN or infinite" in message


@pytest.mark.parametrize("text", ["", "0", "1:0", "0:0", "a:b", "0:nan", "0:inf", "0:1:2", "auto:", "16"])
def test_what_is_no_range_is_refused(text):
    assert refusal(lambda: parse_range(text)).startswith(f"data.range={text}: ")


def test_ranges_are_written_as_advised():
    with advises("data.range=9-5: not a range. Use auto, full, or MIN:MAX such as 0:4095"):
        parse_range("9-5")
    with advises("data.range=9:5: MIN must be below MAX. Use auto, full, or MIN:MAX such as 0:4095"):
        parse_range("9:5")
    with advises("data.range=0:1e31: too large. Use MIN and MAX between -1e+30 and 1e+30"):
        parse_range("0:1e31")
    for advised in ("auto", "full", "0:4095", "-1e+30:1e+30"):
        assert parse_range(advised)


def test_a_range_in_which_nothing_lies_is_refused_with_one_that_works(tmp_path):
    folder = folder_of(tmp_path, {"a.png": FILES["12-grey.png"][0]})
    with advises("data.range=5000:9000: all images would be black, their values are 0:4095. Use --data.range=0:4095"):
        load_data(folder, resolution=None, value_range="5000:9000")
    assert load_data(folder, resolution=None, value_range="0:4095").images.max() == 255


@pytest.mark.parametrize("name", ["white-is-0.tif", "planes.tif", "cmyk-16.tif"])
def test_deep_images_that_pillow_would_read_wrongly_are_named(tmp_path, name):
    data = {
        "white-is-0.tif": tiff(BITS_12, 0),
        "planes.tif": tiff(COLOR_12, 2, t284=2, deflate=True),
        "cmyk-16.tif": tiff(np.concatenate([COLOR_12, BITS_12[..., None]], axis=2), 5),
    }[name]
    message = refusal(lambda: load_data(folder_of(tmp_path, {name: data}), resolution=None))
    assert f"{name} cannot be decoded" in message
    assert "save it" in message


# Rare images beyond what was looked at --------------------------------------------------------------------------


@pytest.fixture
def rare(tmp_path, monkeypatch):
    """A folder of 40 images of 12 bits, of which one that is not looked at has 14, and another 8."""
    monkeypatch.setattr("paragan.data.dataset.DEEP_SAMPLE", 10)
    files = {f"{i:02d}.png": FILES["12-grey.png"][0] for i in range(40)}
    files["13.png"] = FILES["14-bit.png"][0]
    return folder_of(tmp_path / "set", files | {"15.png": FILES["8-bit.png"][0]})


def test_a_rare_brighter_image_is_refused_and_the_advice_works(rare):
    with advises(
        f"data.range=auto: 1 of 40 images hold uint16 0:16383, the first is {Path(rare) / '13.png'}; 0:4095 was found "
        "from others, --data.range=0:4095 clips them. Use --data.range=0:16383"
    ):
        load_data(rare, resolution=None)
    assert load_data(rare, resolution=None, value_range="0:16383").images[13].max() == 255
    assert (load_data(rare, resolution=None, value_range="0:4095").images[13] == 255).sum() > 30


def test_while_streaming_a_rare_brighter_image_is_a_bad_one_and_named(rare):
    data = load_data(rare, resolution=None, cache="stream", max_bad_fraction=0.1)
    np.testing.assert_array_equal(data.images[13], data.images[14])  # the next one replaces it
    assert data.bad_samples is not None
    (line,) = data.bad_samples.to_lines()
    assert "13.png" in line
    assert "holds values from 0 to 16383" in line
    assert "use --data.range=0:4095 to clip them" in line


def test_a_rare_deep_image_in_an_8_bit_set_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("paragan.data.dataset.HEADER_SAMPLE", 10)
    files = {f"{i:02d}.png": FILES["8-bit.png"][0] for i in range(40)} | {"15.png": FILES["12-grey.png"][0]}
    folder = folder_of(tmp_path, files)
    message = refusal(lambda: load_data(folder, resolution=None))
    assert "1 of 40 images hold uint16 0:4095" in message
    assert "Use --data.range=0:4095" in message
    assert load_data(folder, resolution=None, value_range="0:4095").images[15].max() == 255
    assert load_data(folder, resolution=None, value_range="full").images[15].max() == 15


def test_of_an_array_all_images_are_looked_at(tmp_path):
    images = np.zeros((DEEP_SAMPLE + 1001, 2, 2), np.uint16)
    images[1] = 16000
    assert str(load_data(npz(tmp_path / "a.npz", images), resolution=8).value_range) == "0:16383"


# What follows from the range -------------------------------------------------------------------------------------


def test_the_range_is_part_of_the_fingerprint_and_8_bit_data_keep_theirs(tmp_path):
    folder = folder_of(tmp_path / "deep", {"a.png": FILES["12-grey.png"][0]})
    for cache in ("memory", "stream"):
        options = ("auto", "0:2000", "full")
        prints = [load_data(folder, resolution=None, value_range=o, cache=cache).fingerprint for o in options]
        assert len(set(prints)) == 3
        assert load_data(folder, resolution=None, value_range="auto:0:4095", cache=cache).fingerprint == prints[0]
    pixels = np.stack([(np.arange(192) * (i + 1) % 256).astype(np.uint8).reshape(8, 8, 3) for i in range(4)])
    files = {f"{i}.bmp": encode(Image.fromarray(image), "BMP") for i, image in enumerate(pixels)}
    folder = folder_of(tmp_path / "plain", files)
    expected = {"memory": "31c9cdec359f9075", "stream": "0b5aaaab4446ebe7"}  # before there were ranges
    assert {cache: load_data(folder, resolution=8, cache=cache).fingerprint for cache in expected} == expected


def test_one_class_keeps_the_range_of_the_whole_set(tmp_path):
    files = {"a.png": png16(BITS_12[..., None] // 64), "b.png": FILES["12-grey.png"][0]}
    for name, data in files.items():
        folder_of(tmp_path / name[0], {name: data})
    for cache in ("memory", "stream"):
        data = load_data(str(tmp_path), resolution=None, cache=cache).only_class(0)
        np.testing.assert_array_equal(data.images[:][0, ..., 0], BITS_12 // 64 >> 4)
        assert str(data.value_range) == "0:4095"


def test_a_run_records_the_range_it_found_and_keeps_it_for_other_data(tmp_path):
    """A resume, and `eval --data`, see values as training did; a darker set is not stretched."""
    bright = folder_of(tmp_path / "bright", {"a.png": FILES["12-grey.png"][0]})
    dark = folder_of(tmp_path / "dark", {"a.png": png16(BITS_12[..., None] // 64)})
    run = make_run(f"data.path={bright}")
    dataset = load_dataset(run.data)
    data = resolve(run, dataset).data
    assert data.range == "auto:0:4095"
    assert load_dataset(data).fingerprint == dataset.fingerprint
    other = load_dataset(dataclasses.replace(data, path=dark))
    np.testing.assert_array_equal(other.images[0, ..., 0], BITS_12 // 64 >> 4)
    plain = folder_of(tmp_path / "plain", {"a.png": FILES["8-bit.png"][0]})
    run = make_run(f"data.path={plain}")
    assert resolve(run, load_dataset(run.data)).data.range == "auto"


@pytest.mark.parametrize("text", ["0:4095", "10:50", "-1:1", "-1000:3000", "0.5:1.5", "full", "auto"])
def test_a_range_on_the_command_line_is_what_was_typed(text):
    assert make_run(f"data.range={text}").data.range == text


def test_processes_map_as_threads_do():
    arena = SharedArena()
    block = arena.allocate((3, SIDE, SIDE, 3))
    samples = [FILES["12-rgb.png"][0], COLOR_12, FILES["14-bit.png"][0]]
    with DecodeWorker(arena, decoder=ImageDecoder(ValueRange(0, 4095, clips=False))) as worker:
        reasons, _ = worker.decode(samples, [False] * 3, block, 0)
    assert reasons[:2] == [None, None]
    assert "holds values from 0 to 16383" in str(reasons[2])
    np.testing.assert_array_equal(block.array[:2], [COLOR_12 >> 4] * 2)


# What is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "value_range", "expected"),
    [
        ({"a.png": encode(Image.new("RGB", (8, 8), (7, 8, 9)), "PNG")}, "auto", "constant: all pixels of 1 image that"),
        ({"a.png": encode(Image.fromarray(BITS_8 // 32), "PNG")}, "auto", "lie between 0 and 7 of 255"),
        ({"a.png": encode(Image.fromarray(BITS_8 // 32), "PNG")}, "auto", "--data.range=0:7 stretches them"),
        ({"a.png": FILES["12-grey.png"][0]}, "full", "almost constant: all pixels of 1 image"),
        ({"a.png": FILES["12-grey.png"][0]}, "1000:3000", "values outside are clipped"),
        ({"a.png": FILES["12-grey.png"][0]}, "auto", "values 0:4095 found in 1 image of uint16; 0:4095 becomes 0:255"),
        (
            {"a.png": FILES["8-bit.png"][0]},
            "full",
            "data.range=0:65535 changes nothing: the images that were looked at",
        ),
        ({"a.png": FILES["8-bit.png"][0], "b.png": FILES["12-grey.png"][0]}, "auto", "; 8-bit images are unchanged"),
        ({"a.tif": FILES["cmyk.tif"][0]}, "auto", "1 are CMYK, converted to RGB without their colour profile"),
        (
            {"a.gif": FILES["frames.gif"][0]},
            "auto",
            "1 are animations or have several pages, of which the first is used",
        ),
        (
            {"a.tif": FILES["pages.tif"][0]},
            "auto",
            "1 are animations or have several pages, of which the first is used",
        ),
        (
            {"a.png": FILES["frames.png"][0]},
            "auto",
            "1 are animations or have several pages, of which the first is used",
        ),
        ({"a.webp": FILES["frames.webp"][0]}, "auto", "1 are animations or have several pages"),
        ({"a.png": FILES["12-rgba.png"][0]}, "auto", "1 may have transparency, which is composited on white"),
    ],
)
def test_what_was_found_and_done_is_said(tmp_path, files, value_range, expected):
    folder = folder_of(tmp_path, files)
    for cache in ("memory", "stream"):
        data = load_data(folder, resolution=None, value_range=value_range, cache=cache)
        assert expected in data.describe().replace("\n  ", " ")
    report = inspect_dataset(open_source(folder), value_range=value_range)
    assert report.value_range == data.value_range
    assert all(note in "\n".join(report.to_lines()) for note in report.range_notes)


def test_of_plain_images_nothing_is_said(tmp_path):
    data = load_data(folder_of(tmp_path, {"a.png": FILES["8-bit.png"][0]}), resolution=None)
    assert data.describe() == "1 image, 8 x 8, grey\nno classes\nfound 8 x 8; unchanged"
    assert data.value_range is None
