"""Files that are written whole or not at all."""

import errno
from pathlib import Path

import pytest

from advice import Case, case_id
from paragan.core.atomic_write import atomic_output, name_full_disk

CASES = [
    Case("--json=/", "/: is not a file name. Give the name of a file to write", ("--json=NEW/a.json",)),
    Case("--json=.", ".: is not a file name. Give the name of a file to write", ("--json=NEW/a.json",)),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_file_has_a_name_as_advised(case, check_advice):
    check_advice(case, ["data", "inspect", "digits"])


def test_the_error_of_a_full_disk_has_the_name_of_the_file(tmp_path):
    def fill(code: int) -> None:
        raise OSError(code, "trouble")

    out = tmp_path / "a.npz"
    with pytest.raises(OSError, match=r"trouble: '.*/a\.npz'"), atomic_output(out):
        fill(errno.ENOSPC)
    with pytest.raises(OSError, match=r"trouble$"), name_full_disk(out):
        fill(errno.ECONNRESET)
    full = Path("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), name_full_disk(full):
        full.write_bytes(b"a")
