"""`paragan completion`: what a real bash completes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paragan.cli.main import main
from processes import usage_error


@pytest.mark.parametrize(
    ("line", "completions"),
    [("paragan tra", ["train"]), ("paragan bench st", ["step", "strategies"]), ("paragan eval --met", ["--metrics"])],
)
def test_bash_completes_commands_and_options(line, completions, tmp_path):
    script = subprocess.run([sys.executable, "-m", "paragan", "completion", "bash"], capture_output=True, timeout=100)
    (tmp_path / "paragan").write_bytes(script.stdout)
    words = line.split()
    complete = (
        f"source {tmp_path}/paragan; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        f"$(complete -p paragan | grep -o '_[a-z_]*') paragan {words[-1]} {words[-2]}; printf '%s\\n' ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", complete], capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    assert sorted(done.stdout.split()) == completions


def test_other_shells_have_scripts(capsys):
    for shell, start in (("zsh", "#compdef paragan"), ("tcsh", "# AUTOMATICALLY GENERATED")):
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out.startswith(start)


def test_unknown_shells_and_a_missing_package_are_one_line(monkeypatch):
    assert usage_error("completion", "fish").startswith("paragan: there is no fish; did you mean ")
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert usage_error("completion", "bash") == "paragan: completion: needs shtab: pip install shtab\n"
