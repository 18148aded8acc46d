"""Broken data, thousands of it: a program that test_fuzz.py starts, since what it looks for may end it.

python fuzz.py FOLDER BLOCK... prints a line of JSON a block. Every input is seeded by its block and number, and lies in
FOLDER/input when it is tried. Whatever is read ends well, or with one line of `Unusable`, `DecodeError` or `Failed`.
"""

from __future__ import annotations

import faulthandler
import io
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tarfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

import fake_datasets
from paragan.core.errors import RunError, UsageError
from paragan.data.decode import decode_into
from paragan.data.open_source import open_source
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import RemoteOptions

HEADROOM_BYTES = 4 * 2**30  # bytes of addresses beyond what the program takes at its start
INPUT_TIMEOUT_S = 10  # processor time, an input
MAX_RECORDS = 12  # records of an input, at most

IMAGES = fake_datasets.random_images(6)
LABELS = [0, 1, 2, 0, 1, 2]
PNGS = [fake_datasets.encode_image(image) for image in IMAGES]

Rng = random.Random
Files = dict[str, bytes]


class InputTimeout(BaseException):
    """An input took too long."""


class PickleTrap:
    """Unpickling this leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


# Damage -----------------------------------------------------------------------------------------------------


def flip_bytes(rng: Rng, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 30)) if out else 0):
        out[rng.randrange(len(out))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(out)


def damage_end(rng: Rng, data: bytes) -> bytes:
    """Bits of the last part: directories, footers."""
    cut = max(0, len(data) - rng.choice((60, 300, 1500)))
    return data[:cut] + flip_bytes(rng, data[cut:])


def damage_start(rng: Rng, data: bytes) -> bytes:
    cut = rng.choice((40, 200, 1000))
    return flip_bytes(rng, data[:cut]) + data[cut:]


def truncate(rng: Rng, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def splice(rng: Rng, data: bytes) -> bytes:
    """A piece of it somewhere else, over what is there or in between."""
    start, to, length = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1), rng.randrange(1, 600)
    return data[:to] + data[start : start + length] + data[to + length * rng.randrange(2) :]


def corrupt_integers(rng: Rng, data: bytes) -> bytes:
    """Some number in it is another: extreme, as lengths and offsets would be."""
    if len(data) < 8:
        return data
    out = bytearray(data)
    for _ in range(rng.choice((1, 2, 4))):
        size = rng.choice((2, 4, 8))
        value = rng.choice((0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), rng.getrandbits(8 * size), 2**15))
        at = rng.randrange(len(out) - size + 1)
        out[at : at + size] = value.to_bytes(size, rng.choice(("little", "big")))
    return bytes(out)


def corrupt_digits(rng: Rng, data: bytes) -> bytes:
    """Some digit in text is another, or many."""
    at = [i for i, byte in enumerate(data[:20_000]) if 48 <= byte < 58]
    if not at:
        return flip_bytes(rng, data)
    i = rng.choice(at)
    return data[:i] + rng.choice((b"9", b"99999999999999999999", b"-1", b"1e999", b"0", b"[", b"null")) + data[i + 1 :]


MUTATIONS = (flip_bytes, flip_bytes, damage_end, damage_start, truncate, splice, corrupt_integers, corrupt_digits)


def mutate(rng: Rng, data: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2))):
        data = rng.choice(MUTATIONS)(rng, data)
    return data


def mutate_one(rng: Rng, files: Files) -> Files:
    name = rng.choice([name for name in files if files[name]])
    return {**files, name: mutate(rng, files[name])}


# Whole ones of every format ---------------------------------------------------------------------------------


def make_zip(members: Files, method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
        warnings.simplefilter("ignore")
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def make_tar(members: list[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def make_npz(save: Callable = np.savez, **arrays) -> bytes:
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def make_h5(**options) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w", libver=options.pop("libver", "earliest")) as stored:
        stored.create_dataset("imgs", data=np.ascontiguousarray(IMAGES.transpose(0, 3, 1, 2)), **options)
        stored["labels"] = LABELS
        stored["classes"] = ["ant", "bee", "cat"]  # of variable length
    return file.getvalue()


NAMES = [f"{i}/{i}.png" for i in range(6)]
DATASET_JSON = fake_datasets.dataset_json(NAMES, LABELS).encode()
CLASS_FOLDERS: Files = {f"{'abc'[label]}/{i}.png": PNGS[i] for i, label in enumerate(LABELS)}
MEMBERS = [one for i in range(6) for one in ((f"{i}.png", PNGS[i]), (f"{i}.cls", b"%d" % LABELS[i]))]
LONG_NAME_MEMBERS = [(f"{'long' * 40}{name}", data) for name, data in MEMBERS]
SINGLE_IMAGES: Files = {
    "png": PNGS[0],
    "jpg": fake_datasets.encode_image(IMAGES[0], "JPEG"),
    "jpeg": fake_datasets.encode_image(
        IMAGES[0], "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0"
    ),
    "webp": fake_datasets.encode_image(IMAGES[0], "WEBP"),
    "bmp": fake_datasets.encode_image(IMAGES[0], "BMP"),
    "gif": fake_datasets.encode_image(IMAGES[0], "GIF"),
    "tif": fake_datasets.encode_image(IMAGES[0], "TIFF"),
    "tiff": fake_datasets.encode_image(IMAGES[0], "TIFF", compression="tiff_lzw"),
}


# Blocks: what input number i of a block is ------------------------------------------------------------------


def write_images(rng: Rng, folder: Path) -> Path:
    kinds = list(SINGLE_IMAGES)
    for name in "abc":
        kind, expected = rng.choice(kinds), rng.choice(kinds)
        data = oversized_image(rng, kind) if rng.random() < 0.3 else mutate(rng, SINGLE_IMAGES[kind])
        (folder / f"{name}.{expected if rng.random() < 0.3 else kind}").write_bytes(data)
    return folder


def oversized_image(rng: Rng, kind: str) -> bytes:
    """An image that says to be enormous."""
    side, data = rng.choice((2**16 - 1, 2**14 - 1, 2**31 - 1, 0)), bytearray(SINGLE_IMAGES[kind])
    if kind == "png":
        data[16:24] = struct.pack(">2L", side, side)
        data[29:33] = struct.pack(">L", zlib.crc32(data[12:29]))
    elif kind == "bmp":
        data[18:26] = struct.pack("<2l", side, rng.choice((1, -1)) * side)
    elif kind in ("jpg", "jpeg"):
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">2H", side & 0xFFFF, side & 0xFFFF)
    elif kind == "gif":
        data[6:10] = struct.pack("<2H", side & 0xFFFF, side & 0xFFFF)
    elif kind in ("tif", "tiff"):
        for tag in (256, 257):  # width and height
            at = max(data.find(struct.pack("<HHL", tag, field_type, 1)) for field_type in (3, 4)) + 8
            data[at : at + 4] = struct.pack("<L", side)
    else:
        data[26:30] = struct.pack("<2H", side & 0x3FFF, side & 0x3FFF)
    return bytes(data)


def write_npz(rng: Rng, folder: Path) -> Path:
    save = rng.choice((np.savez, np.savez_compressed))
    data = make_npz(save, images=IMAGES, labels=LABELS, classes=np.array(["a", "b", "c"]))
    if rng.random() < 0.05:
        data = make_npz(images=IMAGES, labels=np.array([PickleTrap(folder.parent / "sprung")], object))
    return write_file(folder / "a.npz", mutate(rng, data))


def write_zip(rng: Rng, folder: Path) -> Path:
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    names = ["../../up.png", "/etc/x.png", "a\\..\\b.png", "C:\\c.png", "a/../../../d.png", "x\0e.png"]
    members = rng.choice(
        (
            CLASS_FOLDERS,
            {**dict(zip(NAMES, PNGS)), "dataset.json": DATASET_JSON},
            {**dict(zip(NAMES, PNGS)), "dataset.json": mutate(rng, DATASET_JSON)},
            {**dict(zip(names, PNGS)), "dataset.json": fake_datasets.dataset_json(names, LABELS).encode()},
            {"a.png": bytes(300_000)},
        )
    )
    data = make_zip(members, method)
    return write_file(folder / "a.zip", rng.choice((damage_end, damage_end, mutate))(rng, data))


def write_dataset_json(rng: Rng, folder: Path) -> Path:
    for name, data in zip(NAMES, PNGS):
        write_file(folder / name, data)
    text = mutate(rng, DATASET_JSON)
    if rng.random() < 0.1:
        text = b'{"labels": ' + rng.choice((b"[" * 50_000, b"9" * 9999, b'[["../x.png", 1]]', b"NaN")) + b"}"
    write_file(folder / "dataset.json", text)
    return folder


def write_h5(rng: Rng, folder: Path) -> Path:
    options = rng.choice(
        (
            {},
            {"chunks": (2, 3, 8, 8)},
            {"chunks": (2, 3, 8, 8), "compression": "gzip", "shuffle": True, "fletcher32": True},
            {"chunks": (1, 3, 8, 8), "compression": "lzf", "libver": "latest"},
            {"libver": "latest"},
        )
    )
    return write_file(folder / rng.choice(("a.h5", "a.hdf5")), mutate(rng, make_h5(**options)))


def write_tar(rng: Rng, folder: Path) -> Path:
    form = rng.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    members = rng.choice((MEMBERS, LONG_NAME_MEMBERS, [("../../up.png", PNGS[0]), ("/etc/passwd.png", PNGS[1])]))
    data = make_tar(
        members, form if members is not LONG_NAME_MEMBERS else rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    )
    if rng.random() < 0.5:  # a header that is damaged, with a checksum that is right
        out, at = bytearray(data), 512 * rng.randrange(max(1, len(data) // 512))
        header = bytearray(flip_bytes(rng, bytes(out[at : at + 512])) if rng.random() < 0.5 else out[at : at + 512])
        header[156:157] = rng.choice((b"0", b"1", b"2", b"5", b"L", b"x", b"g", b"S", b"K", b"D", b"V", b"\0"))
        if rng.random() < 0.5:
            header[124:136] = rng.choice((b"77777777777\0", b"\x80" + b"\xff" * 11, b"-0000000001\0", bytes(12)))
        header[148:156] = b"%06o\0 " % (sum(header[:148]) + 256 + sum(header[156:512]))
        out[at : at + 512] = header
        data = bytes(out)
    else:
        data = mutate(rng, data)
    write_file(folder / "a.tar", data)
    return folder / rng.choice(("", "a.tar", "*.tar"))


def write_tar_index(rng: Rng, folder: Path) -> Path:
    from paragan.data.formats.tar_index import build_index
    from paragan.data.storage.local import LocalFileSystem

    size = write_file(folder / "a.tar", make_tar(MEMBERS)).stat().st_size
    data = build_index(LocalFileSystem(folder), ["a.tar"], [size]).to_bytes()
    if rng.random() < 0.5:
        parts = dict(np.load(io.BytesIO(data)))
        key = rng.choice(list(parts))
        parts[key] = rng.choice((parts[key][:3], parts[key][::-1], parts[key].reshape(1, -1), parts[key].astype(str)))
        data = make_npz(**parts)
    write_file(folder / "paragan-index.npz", mutate(rng, data) if rng.random() < 0.7 else data)
    return folder


def write_arrow(rng: Rng, folder: Path) -> Path:
    for name, data in mutate_one(rng, arrow_files()).items():
        write_file(folder / name, data)
    return folder


_ARROW: Files = {}


def arrow_files() -> Files:
    if not _ARROW:
        import datasets

        datasets.disable_progress_bars()
        features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b", "c"]))
        rows = {"image": [{"bytes": data, "path": None} for data in PNGS], "label": LABELS}
        build = Path("arrow")  # the working folder is in FOLDER
        datasets.Dataset.from_dict(rows, features).save_to_disk(str(build))
        _ARROW.update({path.name: path.read_bytes() for path in build.iterdir()})
        shutil.rmtree(build)
    return _ARROW


_PARQUET: list[bytes] = []


def write_parquet(rng: Rng, folder: Path) -> Path:
    if not _PARQUET:
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"image": [{"bytes": data, "path": None} for data in PNGS], "label": LABELS})
        out = io.BytesIO()
        parquet.write_table(table, out, row_group_size=2)
        _PARQUET.append(out.getvalue())
    return write_file(folder / "a.parquet", mutate(rng, _PARQUET[0]))


def write_mixed_folder(rng: Rng, folder: Path) -> Path:
    """Names and files that belong to some other format, or to none."""
    wholes = [
        make_zip(CLASS_FOLDERS),
        make_tar(MEMBERS),
        make_h5(),
        make_npz(images=IMAGES),
        *SINGLE_IMAGES.values(),
        DATASET_JSON,
        b"",
        b"x" * 99,
    ]
    names = [
        *("a.png", "b.jpg", "c.zip", "d.h5", "e.npz", "f.tar", "dataset.json", "state.json", "dataset_info.json"),
        *("data_batch_1", "train", "meta", "dataset_dict.json", "paragan-index.npz", "classes.json", "cat/a.png", "x"),
        *("batches.meta", "train/a.png", "g.hdf5", ".hidden.png", "new\nline.png", "cat/\x1b[1m.png"),
    ]
    selected = rng.sample(names, rng.randrange(1, 6))
    for name in selected:
        path = folder / name
        if not any(part.is_file() for part in path.parents) and not path.is_dir():
            write_file(path, rng.choice(wholes))
    return folder / rng.choice(("", "", *selected, "*.tar", "x-{0..3}.tar", "{5..1}.tar", "*/a.tar"))


CASES: dict[str, tuple[Callable[[Rng, Path], Path], int]] = {
    "images": (write_images, 2400),
    "npz": (write_npz, 1200),
    "zip": (write_zip, 1400),
    "listing": (write_dataset_json, 600),
    "hdf5": (write_h5, 1200),
    "tar": (write_tar, 2200),
    "index": (write_tar_index, 400),
    "arrow": (write_arrow, 300),
    "parquet": (write_parquet, 300),
    "folder": (write_mixed_folder, 300),
}


# Trying them ------------------------------------------------------------------------------------------------


def write_file(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def try_open(where: Path, cache: Path, labels: bool) -> str:
    """How it ended: fine, or the kind of error, which must be of one line."""
    try:
        source = open_source(str(where), RemoteOptions(cache_dir=str(cache)), labels=labels)
        assert source.labels is None or len(source.labels) == len(source)
        assert len(source) > 0
        ends = {"fine"}
        out = np.empty((8, 8, 3), np.uint8)
        for index in sorted({*range(min(MAX_RECORDS, len(source))), len(source) - 1}):
            assert "\n" not in source.sample_name(index)
            try:
                decode_into(source.read(index), out)
            except DecodeError as error:
                ends.add(error_kind(error))
        for part in source.fingerprint_parts():
            assert isinstance(part, bytes)
        return " and ".join(sorted(ends))
    except (UsageError, RunError) as error:
        return error_kind(error)


def error_kind(error: Exception) -> str:
    expected = str(error)
    assert expected, "an error that says nothing"
    assert expected.isprintable(), f"not on one line: {expected!r}"
    assert len(expected) < 2000, f"a long line: {expected[:300]}"
    return type(error).__name__


def list_paths(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if "input" not in path.relative_to(folder).parts[:1]}


def run_case(name: str, folder: Path) -> dict:
    make, count = CASES[name]
    started, ends, wrong, slowest = time.monotonic(), Counter(), [], 0.0
    before = list_paths(folder)
    for number in range(count):
        rng, place_ = Rng(f"{name} {number}"), folder / "input"
        shutil.rmtree(place_, ignore_errors=True)
        place_.mkdir()
        where = make(rng, place_)
        sys.stderr.write(f"{name} {number}\n")
        started_at = time.monotonic()
        signal.setitimer(signal.ITIMER_PROF, INPUT_TIMEOUT_S)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.filterwarnings("always", append=True)  # what a user would see
                ends[try_open(where, folder / "cache", labels=number % 5 > 0)] += 1
            assert not warned, f"warned: {warned[0]}"
        except (Exception, InputTimeout):
            wrong.append(f"{name} {number}: {' | '.join(traceback.format_exc().splitlines()[-8:])}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.monotonic() - started_at)
    build = sorted(path for path in list_paths(folder) - before if not path.startswith(str(folder / "cache")))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    seconds = round(time.monotonic() - started, 2)
    about = {"block": name, "count": count, "seconds": seconds, "slowest": round(slowest, 3), "peak_mb": peak}
    return {**about, "ends": ends, "wrong": wrong[:20], "many_wrong": len(wrong), "made": build}


def raise_timeout(*_) -> None:
    raise InputTimeout


if __name__ == "__main__":
    faulthandler.enable()
    signal.signal(signal.SIGPROF, raise_timeout)
    arrow_files()  # imports what is imported lazily, before memory is bounded
    decode_into(SINGLE_IMAGES["jpg"], np.empty((8, 8, 3), np.uint8))
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + HEADROOM_BYTES, now + HEADROOM_BYTES))
    for block in sys.argv[2:]:
        sys.stdout.write(f"{json.dumps(run_case(block, Path(sys.argv[1])))}\n")
        sys.stdout.flush()
