"""A run that diverges ends with advice that keeps it from diverging."""

from __future__ import annotations

from advice import advises
from paragan.core.errors import Diverged
from processes import call_command, run_cli, train_args

DIVERGING = (
    *("--objective.loss=wasserstein", "--nets.spectral=false", "--evaluation.metrics=[]"),
    *("--g.optimizer=sgd", "--g.optimizer.lr=0.3", "--d.optimizer=sgd", "--d.optimizer.lr=0.3"),
    *("--kimg=0.288", "--output.tick_kimg=4"),
)


def test_a_run_that_diverged_is_trained_as_advised(tmp_path):
    command = train_args(tmp_path / "diverged", *DIVERGING)
    with advises("Lower --d.optimizer.lr and --g.optimizer.lr, or add --objective.r1", Diverged):
        call_command(*command)
    for name, advice in (("lower", ["--d.optimizer.lr=0.03", "--g.optimizer.lr=0.03"]), ("r1", ["--objective.r1=10"])):
        assert run_cli(*command, f"--run-dir={tmp_path / name}", *advice).status == 0
