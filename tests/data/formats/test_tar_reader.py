"""Headers of tars: what the standard library reads is read, and what it takes without an error is refused."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from paragan.core.errors import UsageError
from paragan.data.formats.tar_reader import SequentialReader, TarMember, iter_members
from paragan.data.storage.local import LocalFileSystem

LONG_NAME = "folder/" * 40 + "a.png"


def read_members(path: Path) -> list[TarMember]:
    return list(iter_members(SequentialReader(LocalFileSystem(path.parent), path.name, path.stat().st_size)))


def read_error(folder: Path, data: bytes) -> str:
    (folder / "a.tar").write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read_members(folder / "a.tar")
    return str(caught.value)


def make_header(kind: bytes = b"0", size: bytes = b"%011o\0" % 0, name: bytes = b"a.png") -> bytes:
    """Return a header with a checksum that is right."""
    header = bytearray(tarfile.TarInfo(name.decode()).tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = size
    header[156:157] = kind
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:512]))
    return bytes(header)


def make_extended(records: bytes) -> bytes:
    """Return a tar of an extended header and an empty file."""
    padded = records + bytes(-len(records) % 512)
    return make_header(b"x", b"%011o\0" % len(records)) + padded + make_header() + bytes(1024)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_regular_files_are_those_of_the_standard_library(tmp_path, form):
    names = ["a.png", "b/ü.png", *([LONG_NAME] if form != tarfile.USTAR_FORMAT else [LONG_NAME[-150:]])]
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as archive:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 600 * number
            archive.addfile(info, io.BytesIO(bytes(info.size)))
            for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
                other = tarfile.TarInfo(f"other{number}")
                other.type, other.linkname = kind, "a.png"
                archive.addfile(other)
    with tarfile.open(tmp_path / "a.tar") as archive:
        expected = [TarMember(info.name, info.offset_data, info.size) for info in archive if info.isreg()]
    assert [member.name for member in expected] == names
    assert read_members(tmp_path / "a.tar") == expected


@pytest.mark.skipif(not shutil.which("tar"), reason="there is no tar")
def test_times_of_an_incremental_tar_are_no_part_of_names(tmp_path):
    (tmp_path / "a.png").write_bytes(b"1")
    command = ["tar", "--create", "--format=gnu", "--listed-incremental=list", "--file=a.tar", "a.png"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    if "unrecognized option" in ran.stderr or "unknown option" in ran.stderr:
        pytest.skip("tar is not that of GNU")
    assert ran.returncode == 0, ran.stderr
    assert [member.name for member in read_members(tmp_path / "a.tar")] == ["a.png"]


def test_a_large_size_is_to_base_256(tmp_path):
    error = read_error(tmp_path, make_header(size=b"\x80" + (2**40).to_bytes(11, "big")) + bytes(1024))
    assert f"a member of {2**40:,} bytes is not complete" in error


@pytest.mark.parametrize("size", [b"\xff" * 12, b"-0000000512\0", b"0000000000x\0"])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    assert "at byte 0 there is no header of a tar" in read_error(tmp_path, make_header(size=size) + bytes(1024))


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (b"12 size=abc\n", "an extended header holds a size that is not a number"),
        (b"12 size=-10\n", "an extended header holds a size that is not a number"),
        (b"99 path=b.png\n", "an extended header is damaged"),
        (b"0 path=b.png\n", "an extended header is damaged"),
        (b"path=b.png\n", "an extended header is damaged"),
        (b"22 GNU.sparse.major=1\n", "a sparse file begins"),
    ],
)
def test_damaged_extended_headers_are_refused(tmp_path, records, expected):
    assert expected in read_error(tmp_path, make_extended(records))


def test_extended_headers_are_bounded(tmp_path):
    data = make_header(b"x", b"%011o\0" % 2**21) + bytes(2**21) + make_header() + bytes(1024)
    assert "an extended header takes 2,097,152 bytes" in read_error(tmp_path, data)


def test_ten_thousand_extended_headers_in_a_row_are_read(tmp_path):
    (tmp_path / "a.tar").write_bytes(make_extended(b"14 path=b.png\n")[:1024] * 10_000 + make_header() + bytes(1024))
    assert [member.name for member in read_members(tmp_path / "a.tar")] == ["b.png"]


def test_a_tar_that_ends_early_is_refused(tmp_path):
    assert "it was truncated" in read_error(tmp_path, make_header())
    assert "it was truncated" in read_error(tmp_path, make_header()[:500])
    assert "it was truncated" in read_error(tmp_path, b"")
