"""Each logger with its real library, offline: what it wrote is read back."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import paragan as pg
from advice import advises
from paragan.train.loggers.create_logger import create_logger
from processes import run_cli, train_args, train_interrupted

SHORT = ("--kimg=0.16", "--health.patience_ticks=1", "--health.max_update=1e-9")  # with a finding
MODEL_FILES = {"config.json", "discriminator.safetensors", "model.safetensors"}


def train_in_two_parts(folder: Path, logger: str) -> Path:
    """Train a tiny run that is interrupted after four rounds, and resumed."""
    command = (*SHORT, f"--output.loggers={logger}")
    train_interrupted(folder, 4, *command)
    result = run_cli(*train_args(folder, *command))
    assert result.status == 0
    assert "logger" not in result.out, result.out
    return folder


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["Loss/G/loss"] for line in (run / "stats.jsonl").read_text().splitlines()]


def value_of_score(run: Path) -> float:
    (row,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return row["value"]


def finding_of(run: Path) -> str:
    (row,) = [json.loads(line) for line in (run / "health.jsonl").read_text().splitlines()]
    return f"{row['message']}; {row['advice']}"


# Weights & Biases -------------------------------------------------------------------------------------


@pytest.fixture
def wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_DIR", "WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    module.teardown()
    yield module
    module.teardown()


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: a header of 7 bytes, then the log format of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    assert data[:4] == b":W&B"
    block = 32768
    position = 7
    payload = b""
    while position + 7 <= len(data):
        if block - position % block < 7:  # the rest of a block holds no header
            position += block - position % block
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        payload += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            payload = b""
            yield record


def wandb_rows(records: list[Any]) -> list[dict[str, Any]]:
    rows = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]


def test_wandb(tmp_path, wandb_offline):
    run = train_in_two_parts(tmp_path / "run", "wandb")
    run_id = json.loads((run / "loggers.json").read_text())["wandb"]
    folders = sorted((run / "wandb").glob("offline-run-*"))
    assert [folder.name.rpartition("-")[2] for folder in folders] == [run_id, run_id]
    parts = [list(wandb_records(folder / f"run-{run_id}.wandb")) for folder in folders]
    records = [record for part in parts for record in part]
    first = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert (first.run_id, first.project, first.display_name) == (run_id, "paragan", "run")
    assert config["nets"]["name"] == "dcgan"
    assert config["g"]["optimizer"]["lr"] > 0
    rows = wandb_rows(records)
    assert [row["Loss/G/loss"] for row in rows if "Loss/G/loss" in row] == losses_of(run)
    assert [row["Scores/fd_pixels"] for row in rows if "Scores/fd_pixels" in row] == [value_of_score(run)]
    grids = [row for row in rows if "fakes/path" in row]
    assert [row["Progress/kimg"] for row in grids] == [0.016, 0.16]
    pictures = [folder / "files" / row["fakes/path"] for folder, row in zip(folders, grids, strict=True)]
    assert pictures[1].read_bytes() == (run / "fakes000000.png").read_bytes()
    alerts = [record.alert.text for record in records if record.WhichOneof("record_type") == "alert"]
    assert alerts == [finding_of(run)]
    artifacts = {a.name: {entry.path for entry in a.manifest.contents} for r in records if (a := artifact_of(r))}
    assert artifacts == {"run-model": MODEL_FILES, "run-best": MODEL_FILES}
    exits = [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]
    assert exits == [1, 0]


def artifact_of(record: Any) -> Any:
    """Return the artifact that a record of wandb logs, or None."""
    if record.WhichOneof("record_type") == "artifact":
        return record.artifact
    request = record.request
    return request.log_artifact.artifact if request.WhichOneof("request_type") == "log_artifact" else None


def test_wandb_without_a_key(tmp_path, wandb_offline, monkeypatch):
    info = pg.RunInfo("run", tmp_path, {})
    monkeypatch.setenv("WANDB_MODE", "online")
    logger = create_logger("wandb")
    with advises("--output.loggers=wandb: there is no API key. Use wandb login, or WANDB_MODE=offline"):
        logger.on_start(info)
    logger.close("no key")
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb_offline.teardown()
    logger = create_logger("wandb")
    logger.on_start(info)
    logger.close()


# MLflow -----------------------------------------------------------------------------------------------


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    run = train_in_two_parts(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("paragan")
    (saved,) = client.search_runs([experiment.experiment_id])
    run_id = saved.info.run_id
    assert json.loads((run / "loggers.json").read_text()) == {"mlflow": run_id}
    assert (saved.info.run_name, saved.info.status) == ("run", "FINISHED")
    assert saved.data.params["nets.name"] == "dcgan"
    assert float(saved.data.params["g.optimizer.lr"]) > 0
    history = client.get_metric_history(run_id, "Loss/G/loss")
    assert [(m.step, m.value) for m in history] == [(16 * (i + 1), loss) for i, loss in enumerate(losses_of(run))]
    (score,) = client.get_metric_history(run_id, "Scores/fd_pixels")
    assert (score.step, score.value) == (160, value_of_score(run))
    assert finding_of(run) in saved.data.tags.values()
    assert {Path(a.path).name for a in client.list_artifacts(run_id, "model")} == MODEL_FILES
    assert {Path(a.path).name for a in client.list_artifacts(run_id, "best")} == MODEL_FILES
    grids = [Path(a.path).name for a in client.list_artifacts(run_id, "images") if a.path.endswith(".png")]
    assert sorted(grid.split("timestamp")[0] for grid in grids) == ["fakes+step+16+", "fakes+step+160+"]
    config = yaml.safe_load(mlflow.artifacts.load_text(f"runs:/{run_id}/run.yaml"))
    assert config["kimg"] == 0.16


# Trackio ----------------------------------------------------------------------------------------------


def test_trackio(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
        pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    run = train_in_two_parts(tmp_path / "run", "trackio")
    name = json.loads((run / "loggers.json").read_text())["trackio"]
    assert name.startswith("run-")
    assert SQLiteStorage.get_runs("paragan") == [name]
    rows = SQLiteStorage.get_logs("paragan", name)
    assert [row["Loss/G/loss"] for row in rows if "Loss/G/loss" in row] == losses_of(run)
    assert [row["Scores/fd_pixels"] for row in rows if "Scores/fd_pixels" in row] == [value_of_score(run)]
    assert [row["step"] for row in rows if "fakes" in row] == [16, 160]
    assert SQLiteStorage.get_run_config("paragan", name)["kimg"] == 0.16
    assert [alert["text"] for alert in SQLiteStorage.get_alerts("paragan")] == [finding_of(run)]
    assert {row["name"] for row in SQLiteStorage.get_artifacts("paragan")} == {f"{name}-model", f"{name}-best"}
