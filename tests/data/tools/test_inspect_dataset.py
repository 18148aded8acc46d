"""What `survey` finds in real files, each of them made to be found."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from advice import advises
from paragan.core.errors import UsageError
from paragan.data import decode
from paragan.data.dataset import MAX_AUTO_CACHE_BYTES, load_data
from paragan.data.open_source import open_source
from paragan.data.tools.contact_sheet import make_contact_sheet
from paragan.data.tools.inspect_dataset import DatasetReport, inspect_dataset

RNG = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


def put(path: Path, pixels: np.ndarray | None = None, mode: str | None = None, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(noise(8, 8, 3) if pixels is None else pixels)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


def inspected(where, **options) -> DatasetReport:
    return inspect_dataset(open_source(str(where)), **options)


def text(result: DatasetReport) -> str:
    return "\n".join(result.to_lines())


def test_digits():
    result = inspected("digits")
    assert (result.mode_counts, result.format_counts) == ({"grey": 1797}, {"pixels": 1797})
    assert (result.nbytes, result.resolution, result.channels, result.in_memory) == (1797 * 64, 8, 1, True)
    assert result.bad_reasons == {}
    assert result.duplicates == ()
    assert "all 8 x 8" in text(result)


def test_formats_colours_and_sizes_are_those_of_the_files(tmp_path):
    put(tmp_path / "a.png")
    put(tmp_path / "b.jpg", noise(8, 16, 3))
    put(tmp_path / "c.webp", noise(32, 32, 3))
    put(tmp_path / "d.bmp", noise(8, 8))
    put(tmp_path / "e.png", mode="RGBA")
    put(tmp_path / "f.png", mode="P")
    put(tmp_path / "g.jpg", mode="CMYK")
    put(tmp_path / "h.png", noise(8, 8).astype(np.uint16) * 257)
    put(tmp_path / "i.png", mode="1")
    put(tmp_path / "j.png").rename(tmp_path / "j.jpg")  # the bytes count, not the name
    result = inspected(tmp_path)
    assert result.format_counts == {"PNG": 6, "JPEG": 2, "WEBP": 1, "BMP": 1}
    assert result.mode_counts == {
        "RGB": 4,
        "RGBA": 1,
        "palette": 1,
        "CMYK": 1,
        "grey": 1,
        "grey, 16 bit": 1,
        "black and white": 1,
    }
    assert result.num_with_alpha == 0  # an alpha channel, but all opaque
    assert result.nbytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert "3, 8 x 8 to 32 x 32, median 8 x 8; 1 not square" in text(result)


def test_colour_of_16_bits_is_named(tmp_path):
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">2I5B", 8, 8, 16, 2, 0, 0, 0)
    rows = b"".join(b"\0" + noise(48).tobytes() for _ in range(8))
    start, end = b"\x89PNG\r\n\x1a\n", chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(start + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + end)
    assert inspected(tmp_path).mode_counts == {"RGB, 16 bit": 1}


def test_transparency_is_that_of_pixels(tmp_path):
    solid, hole = np.full((8, 8), 255, np.uint8), np.eye(8, dtype=np.uint8) * 255
    few = Image.fromarray(np.eye(8, dtype=np.uint8), "P")  # of colours 0 and 1
    few.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    for name, alpha in (("solid", solid), ("hole", hole)):
        put(tmp_path / name / "a.png", np.dstack([noise(8, 8, 3), alpha]))
        put(tmp_path / name / "a.webp", np.dstack([noise(8, 8, 3), alpha]), lossless=True)
        few.save(tmp_path / name / "few.png", transparency={"solid": 2, "hole": 1}[name])
    assert inspected(tmp_path / "solid").num_with_alpha == 0
    assert inspected(tmp_path / "hole").num_with_alpha == 3
    assert "alpha     3 with transparency" in text(inspected(tmp_path / "hole"))


def test_bad_images_are_counted_by_format(tmp_path):
    for name in "abc":
        put(tmp_path / f"{name}.png")
    put(tmp_path / "d.jpg").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    (tmp_path / "e.png").write_bytes(b"text")
    result = inspected(tmp_path)
    assert (result.format_counts, result.bad_format_counts) == ({"PNG": 4, "unknown": 1}, {"PNG": 1, "unknown": 1})
    assert "formats   PNG 4 (1 bad), unknown 1 (1 bad)" in text(result)
    assert result.to_json()["bad_formats"] == {"PNG": 1, "unknown": 1}


def test_exif_turns_are_counted_and_sizes_are_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    put(tmp_path / "a.jpg", noise(8, 16, 3), exif=exif)
    result = inspected(tmp_path)
    assert result.num_rotated == 1
    assert result.sizes.tolist() == [[8, 16]]


def test_copies_are_of_pixels_whatever_their_files(tmp_path):
    pixels = noise(8, 8)
    put(tmp_path / "a" / "1.png", pixels)
    put(tmp_path / "a" / "2.bmp", pixels)
    put(tmp_path / "b" / "1.png", pixels, mode="RGB")  # grey all the same
    twice = noise(8, 8, 3)
    put(tmp_path / "b" / "2.png", twice)
    put(tmp_path / "b" / "3.png", twice)
    put(tmp_path / "b" / "4.png", twice.reshape(4, 16, 3))  # the same bytes in another shape are another image
    result = inspected(tmp_path)
    assert [group.tolist() for group in result.duplicates] == [[0, 1, 2], [3, 4]]
    assert [group.tolist() for group in result.conflicting_duplicates] == [[0, 1, 2]]
    assert "3 exact copies of 2 images" in text(result)
    assert "1 image has copies in several classes" in text(result)


def test_duplicates_without_labels_do_not_conflict(tmp_path):
    for name in ("a.png", "b.png"):
        put(tmp_path / name, np.full((8, 8, 3), 7, np.uint8))
    result = inspected(tmp_path)
    assert len(result.duplicates) == 1
    assert result.conflicting_duplicates == []


def test_nearly_constant_images_are_reported(tmp_path):
    put(tmp_path / "black.png", np.zeros((8, 8, 3), np.uint8))
    put(tmp_path / "noise.png")
    speck = np.full((16, 16, 3), 200, np.uint8)
    speck[0, 0] = 210
    put(tmp_path / "speck.png", speck)
    assert inspected(tmp_path).is_flat.tolist() == [True, False, True]


def test_bad_ones_are_named_with_their_reason_and_counted(tmp_path):
    for index in range(30):
        put(tmp_path / f"{index:02d}.png")
    for index in range(12):
        (tmp_path / f"bad{index:02d}.png").write_bytes(b"no image")
    result = inspected(tmp_path)
    assert sorted(result.bad_reasons) == list(range(30, 42))
    expected = text(result)
    assert "12 of 42 cannot be decoded" in expected
    assert expected.count("not a PNG, JPEG, WebP, BMP, TIFF or GIF image") == 10
    assert "and 2 more" in expected
    assert "training does not accept it" in expected
    assert len(result.to_json()["bad"]) == 12
    assert result.good_indices.tolist() == list(range(30))


def test_truncated_files_are_bad_even_if_their_header_can_be_read(tmp_path):
    data = put(tmp_path / "a.png", noise(64, 64, 3)).read_bytes()
    (tmp_path / "b.png").write_bytes(data[: len(data) // 2])
    result = inspected(tmp_path)
    assert list(result.bad_reasons) == [1]
    decode.read_header((tmp_path / "b.png").read_bytes())


def test_a_set_without_valid_images_is_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(UsageError) as caught:
        inspected(tmp_path)
    assert "none of the 1 images" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_inspect_agrees_with_load(tmp_path):
    for index, side in enumerate((20, 30, 40, 50, 60)):
        put(tmp_path / f"{index}.png", noise(side, side + index, 3))
    result, images = inspected(tmp_path), load_data(str(tmp_path), resolution=None)
    assert images.images.shape == (5, result.resolution, result.resolution, result.channels)
    assert result.in_memory == images.in_memory
    requested = inspected(tmp_path, resolution=2**14)
    assert requested.resolution == 2**14
    assert not requested.in_memory
    assert requested.training_bytes > MAX_AUTO_CACHE_BYTES


def test_one_grey_image(tmp_path):
    put(tmp_path / "a.png", noise(8, 8))
    result = inspected(tmp_path)
    assert (result.channels, result.resolution) == (1, 8)
    assert make_contact_sheet(result).mode == "L"


def test_a_sheet_has_a_row_a_class(tmp_path):
    for name, count in {"ant": 3, "bee": 12}.items():
        for index in range(count):
            put(tmp_path / name / f"{index:02d}.png", noise(64, 64, 3))
    (tmp_path / "ant" / "bad.png").write_bytes(b"no image")
    result = inspected(tmp_path)
    samples = np.asarray(make_contact_sheet(result))
    assert samples.shape == (2 * 64 + 2, 8 * 64 + 7 * 2, 3)
    first = np.asarray(Image.open(tmp_path / "ant" / "00.png"))
    assert (samples[:64, :64] == first).all()
    assert not samples[:64, 3 * 66 : 3 * 66 + 64].any()  # no more ants
    assert samples[66:, 7 * 66 :].any()


def test_after_a_change_a_sheet_is_made_as_advised(tmp_path):
    paths = [put(tmp_path / f"{index}.png") for index in range(3)]
    result = inspected(tmp_path)
    paths[1].write_bytes(b"")
    with advises(
        f"data: {paths[1]} changed while it was inspected: not a PNG, JPEG, WebP, BMP, TIFF or GIF image. Try again"
    ):
        make_contact_sheet(result)
    assert make_contact_sheet(inspected(tmp_path)).size


def test_progress_ends_at_all():
    reported = []
    inspected("digits", progress=lambda done, count: reported.append((done, count)))
    assert reported[-1] == (1797, 1797)
    assert reported == sorted(reported)


def test_names_and_counts_reach_json(tmp_path):
    import json

    put(tmp_path / "a" / "1.png")
    put(tmp_path / "b" / "1.png")
    result = json.loads(json.dumps(inspected(tmp_path).to_json()))
    assert result["classes"] == {"a": 1, "b": 1}
    assert result["sizes"] == [[8, 8, 2]]
    assert result["training"] == {"resolution": 8, "channels": 3, "bytes": 2 * 192, "in_memory": True}
