"""Loggers for tests: one that writes every call to a file, one that fails, one that is slow."""

from __future__ import annotations

import json
import time
from pathlib import Path

import paragan


class Recorder(paragan.Logger):
    """Appends a line for every call."""

    def __init__(self, path="calls.jsonl"):
        self.path = Path(path)

    def write(self, method, value, images=None):
        with self.path.open("a") as file:
            file.write(json.dumps([method, value, images]) + "\n")

    def on_start(self, info):
        self.write("start", [info.name, str(info.folder), info.run_id, info.config["kimg"]])
        return "run 1"

    def on_tick(self, stats, images):
        self.write("tick", stats, images)

    def on_images(self, path, pictures, images):
        assert path.exists()
        self.write("images", list(pictures.shape), images)

    def on_scores(self, scores, images):
        self.write("scores", scores, images)

    def on_finding(self, text, images):
        self.write("finding", text, images)

    def on_checkpoint(self, path, images):
        self.write("checkpoint", path.name, images)

    def on_model(self, folder, images):
        self.write("model", folder.name, images)

    def close(self, error=""):
        self.write("close", error)


class Failing(paragan.Logger):
    def on_tick(self, stats, images):
        raise OSError("the server is gone\nand more")


class Slow(paragan.Logger):
    def on_tick(self, stats, images):
        time.sleep(60)


class NoLogger:
    pass
