"""The digest of user code, by which caches notice that it has changed."""

from __future__ import annotations

import importlib
import sys

import pytest

from paragan.config.user_code import user_code_digest
from paragan.losses.adversarial import Adversarial
from paragan.nets import DCGAN


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module of networks that imports another one in its folder."""
    (tmp_path / "my_layers.py").write_text("SCALE = 1\n")
    (tmp_path / "my_nets.py").write_text("import my_layers\n\nclass Nets:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("my_nets")
    for name in ("my_nets", "my_layers"):
        sys.modules.pop(name, None)


def test_built_in_parts_have_no_digest():
    assert user_code_digest(DCGAN(), Adversarial()) == ""


@pytest.mark.parametrize("name", ["my_nets.py", "my_layers.py"])
def test_changed_code_has_another_digest(user_module, tmp_path, name):
    before = user_code_digest(user_module.Nets(), Adversarial())
    assert before
    assert user_code_digest(user_module.Nets()) == before
    with (tmp_path / name).open("a") as file:
        file.write("# changed\n")
    assert user_code_digest(user_module.Nets(), Adversarial()) != before
