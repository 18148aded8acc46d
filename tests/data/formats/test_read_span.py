"""What is about the machine is no bad image."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from paragan.core.errors import RunError
from paragan.data.formats import read_span as module
from paragan.data.formats.read_span import read_span
from paragan.data.source import DecodeError
from paragan.data.storage.local import LocalFileSystem


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> LocalFileSystem:
    (tmp_path / "a.bin").write_bytes(b"0123")
    monkeypatch.setattr(module, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))
    return LocalFileSystem(tmp_path)


def refusing(monkeypatch, number: int, times: int) -> list[str]:
    """The system says this so many times. Returns what was asked."""
    requested, pread = list[str](), os.pread

    def fail_request(*about: int) -> bytes:
        requested.append("read")
        if len(requested) <= times:
            raise OSError(number, os.strerror(number))
        return pread(*about)

    monkeypatch.setattr(os, "pread", fail_request)
    return requested


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EIO])
def test_trouble_of_the_machine_is_waited_for_and_then_ends_the_run(number, place, monkeypatch):
    requested = refusing(monkeypatch, number, 100)
    with pytest.raises(RunError) as caught:
        read_span(place, "a.bin", 1, 2)
    assert len(requested) == 4
    assert f"{place.root / 'a.bin'} cannot be read: {os.strerror(number)} (tried 4 times)" in str(caught.value)
    assert "ulimit -n" in str(caught.value)


def test_a_stale_file_is_reopened(place, monkeypatch):
    assert read_span(place, "a.bin", 0, 2) == b"01"
    before = place._open_files["a.bin"]
    refusing(monkeypatch, errno.ESTALE, 2)
    assert read_span(place, "a.bin", 1, 2) == b"12"
    assert place._open_files["a.bin"] is not before


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.EISDIR])
def test_what_is_about_a_file_is_about_its_image(number, place, monkeypatch):
    requested = refusing(monkeypatch, number, 100)
    with pytest.raises(DecodeError, match=os.strerror(number)):
        read_span(place, "a.bin", 1, 2)
    assert len(requested) == 1
