"""ONNX and torch.export: the same images for any number of them."""

from __future__ import annotations

import builtins
import json

import numpy as np
import pytest
import torch
from torch import nn

import paragan
from paragan.core.errors import RunError, UsageError
from paragan.models import export_graph
from paragan.models.export_graph import SUFFIXES, export_graphs
from paragan.models.model import Model
from paragan.models.sampler import LabelPrior, LatentSource, Sampler, to_float32
from paragan.nets import Spec
from processes import run_cli, usage_error


def test_onnx_makes_the_images_of_the_network(small, tmp_path):
    import onnxruntime

    output = run_cli("export", small, "--format", "onnx", "--out", tmp_path / "g.onnx")
    assert output.status == 0, output
    session = onnxruntime.InferenceSession(tmp_path / "g.onnx")
    z, y = np.random.default_rng(0).standard_normal((7, 8), np.float32), np.arange(7) % 3
    (images,) = session.run(None, {"z": z, "label": y})
    with torch.no_grad():
        expected = paragan.load(small).g(torch.from_numpy(z), torch.from_numpy(y)).numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(images, expected, atol=1e-4)
    about = json.loads(session.get_modelmeta().custom_metadata_map["paragan"])
    assert about["classes"] == ["ant", "bee", "cat"]
    assert [path.name for path in tmp_path.iterdir()] == ["g.onnx"]  # one file, nothing beside it
    content = (tmp_path / "g.onnx").read_bytes()
    assert "g.onnx exists already" in usage_error("export", small, "--format", "onnx", "--out", tmp_path / "g.onnx")
    assert (tmp_path / "g.onnx").read_bytes() == content


@pytest.mark.slow
def test_pt2_makes_the_images_of_the_network(small, tmp_path):
    model = paragan.load(small)
    before = model.sample(2)
    export_graphs(model, "torch-export", tmp_path / "g.pt2")
    z, y = torch.randn(7, 8), torch.arange(7) % 3
    with torch.no_grad():
        images, expected = torch.export.load(tmp_path / "g.pt2").module()(z, y), model.g(z, y)
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)
    np.testing.assert_array_equal(model.sample(2), before)  # its own spectral norm is still there
    assert any("parametrizations" in name for name in model.g.state_dict())


@pytest.mark.slow
def test_a_graph_that_computes_something_else_is_no_success(small, tmp_path, monkeypatch):
    def wrong(path):
        ran = pt2(path)
        return lambda *args: ran(*args) + 1e-3

    pt2 = export_graph._load_pt2
    monkeypatch.setattr(export_graph, "_load_pt2", wrong)
    with pytest.raises(RunError, match=r"1 images differ by 0.001 from the network's"):
        export_graphs(paragan.load(small), "torch-export", tmp_path / "g.pt2")
    assert not list(tmp_path.iterdir())


def test_a_generator_for_every_label_is_a_graph_each(per_label, tmp_path):
    output = run_cli("export", per_label, "--format=torch-export", "--out", tmp_path / "graphs")
    assert output.out.startswith("2 graphs in ")
    z, model = torch.randn(3, 6), paragan.load(per_label)
    for label in range(2):
        images = torch.export.load(tmp_path / "graphs" / f"{label:04d}.pt2").module()(z)
        torch.testing.assert_close(images, model.sampler.for_label(label).g(z, None), atol=1e-4, rtol=0)
    assert "Use a new folder" in usage_error("export", per_label, "--format=onnx", "--out", tmp_path / "g.onnx")
    with pytest.raises(UsageError, match="generator for each label"):
        _ = model.g


class NumbersByLabel(nn.Module):
    """z [N, 6], y [N] -> [N, 5]."""

    def __init__(self):
        super().__init__()
        self.of_latent, self.of_label = nn.Linear(6, 5), nn.Embedding(3, 5)

    def forward(self, z, y):
        return self.of_latent(z) + self.of_label(y)


@pytest.mark.parametrize("graph_format", ["onnx", "torch-export"])
def test_a_graph_of_numbers_takes_labels(graph_format, tmp_path):
    g = NumbersByLabel().eval()
    sampler = Sampler(g, LatentSource(6), LabelPrior((0.2, 0.3, 0.5)), torch.device("cpu"), to_output=to_float32)
    model = Model(sampler, Spec(0, 0, 3, (5,)), {"classes": ["a", "b", "c"], "kimg": 1.0}, tmp_path)
    (path,) = export_graphs(model, graph_format, tmp_path / f"g{SUFFIXES[graph_format]}")
    read = {"onnx": export_graph._load_onnx, "torch-export": export_graph._load_pt2}[graph_format]
    z, y = torch.randn(7, 6), torch.arange(7) % 3
    with torch.no_grad():
        torch.testing.assert_close(read(path)(z, y), g(z, y), atol=1e-5, rtol=0)


def test_refusals(small, tmp_path, monkeypatch):
    assert "ends in .onnx" in usage_error("export", small, "--format", "onnx", "--out", tmp_path / "folder")
    assert "--out" in usage_error("export", small, "--format", "onnx")
    assert "Leave --format out" in usage_error("export", small, "--format", "onnx", "--push", "a/b")
    real = builtins.__import__

    def without(name, *more):
        if name == "onnxscript":
            raise ImportError("No module named 'onnxscript'", name="onnxscript")
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match="needs onnxscript: pip install onnx onnxruntime onnxscript"):
        export_graphs(paragan.load(small), "onnx", tmp_path / "g.onnx")
