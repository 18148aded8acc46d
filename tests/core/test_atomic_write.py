"""Files that are written whole or not at all."""

import pytest

from advice import Case, case_id

CASES = [
    Case("--json=/", "/: is not a file name. Give the name of a file to write", ("--json=NEW/a.json",)),
    Case("--json=.", ".: is not a file name. Give the name of a file to write", ("--json=NEW/a.json",)),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_file_has_a_name_as_advised(case, check_advice):
    check_advice(case, ["data", "inspect", "digits"])
