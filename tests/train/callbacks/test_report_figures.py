"""Pictures of a model beside its grids: neighbors against brute force, ways between samples against their ends."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tiny_run
from paragan.core.errors import UsageError
from paragan.core.image_grid import save_images
from paragan.data.dataset import from_arrays, load_data
from paragan.eval.features import pixels
from paragan.models.model import Model, load_model
from paragan.models.sampler import DataSource, LabelPrior, LatentSource, Sampler, sample_latent
from paragan.nets import DCGAN, SNGAN, Spec
from paragan.report.page import write_report
from paragan.train import trainer
from paragan.train.callbacks import report_figures
from paragan.train.callbacks.report_figures import (
    ModelSamples,
    interpolation_figures,
    is_outdated,
    k_nearest,
    make_figures,
    nearest_neighbors_figure,
    render_strip,
)
from processes import run_cli, train_tiny, usage_error


def model_of(nets=None, classes=3, side=8) -> Model:
    """With weights so large that no two images are alike."""
    torch.manual_seed(0)
    nets = nets or DCGAN(width=4, latent=8)
    spec = Spec(side, 1, classes)
    prior = LabelPrior((1 / classes,) * classes if classes else ())
    g = nets.generator(spec).eval()
    with torch.no_grad():
        for weights in g.parameters():
            weights.add_(0.3 * torch.randn_like(weights))
    sampler = Sampler(g, LatentSource(nets.latent), prior)
    return Model(sampler, spec, {"classes": [f"c{number}" for number in range(classes)]}, Path())


def make_samples(model: Model) -> ModelSamples:
    return ModelSamples(model, tuple(range(model.spec.classes)))


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a tiny run that came to its end."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize("classes", [0, 3])
def test_neighbors_are_those_of_brute_force(classes, monkeypatch):
    monkeypatch.setattr(report_figures, "BLOCK_IMAGES", 7)
    data, fakes = tiny_run.make_dataset(), make_samples(model_of(classes=classes))
    figure = nearest_neighbors_figure(fakes, data, pixels(8, 1), len(data.images))
    samples, _ = fakes.first_samples(report_figures.NUM_FAKES)
    assert len(figure.strips) == len(samples) == (3 if classes else 10)
    flat = data.images.reshape(len(data.images), -1).astype(np.float64)
    for fake, strip in zip(samples, figure.strips):
        assert torch.equal(strip.images[0], fake)
        distances = np.sqrt(((flat - fake.numpy().reshape(1, -1)) ** 2).sum(1)) / 255
        best = np.argsort(distances, kind="stable")[: report_figures.NUM_NEIGHBORS]
        neighbors = strip.images[1:].numpy().transpose(0, 2, 3, 1)
        neighbor_distances = (
            np.sqrt(((neighbors.reshape(5, -1) - fake.numpy().reshape(1, -1).astype(float)) ** 2).sum(1)) / 255
        )
        assert neighbor_distances == pytest.approx(distances[best])
        assert f"nearest at {distances.min():.3g}" in strip.caption


def test_the_usual_distance_is_the_median_of_reals_to_their_nearest(monkeypatch):
    monkeypatch.setattr(report_figures, "NUM_BASELINE_REALS", 300)
    data = tiny_run.make_dataset()
    figure = nearest_neighbors_figure(make_samples(model_of()), data, pixels(8, 1), len(data.images))
    flat = data.images.reshape(len(data.images), -1).astype(np.float64) / 255
    distances = np.linalg.norm(flat[:, None] - flat[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    assert f"{np.sort(distances.min(1))[(len(flat) - 1) // 2]:.3g} from its own nearest neighbor" in figure.description
    assert "all 300 training images" in figure.description


def test_a_copy_is_a_neighbor_and_an_image_is_not_its_neighbor():
    reals = torch.randn(50, 4)
    blocks = ((np.arange(start, start + 10), reals[start : start + 10]) for start in range(0, 50, 10))
    queries = torch.cat([reals[7:8], reals[[3, 9]]]).double()
    distances, where = k_nearest(queries, blocks, np.array([3, 9]))
    assert where[0, 0] == 7
    assert distances[0, 0] == 0
    assert 3 not in where[1]
    assert 9 not in where[2]


def test_neighbors_of_fewer_images_than_columns():
    data = from_arrays(np.zeros((2, 8, 8), np.uint8))
    figure = nearest_neighbors_figure(make_samples(model_of(classes=0)), data, pixels(8, 1), 2)
    assert figure.strips[0].images.shape == (3, 1, 8, 8)


@pytest.mark.parametrize(
    "nets", [DCGAN(width=4, latent=8), DCGAN(width=4, latent=8, g_conditioning="concat"), SNGAN(width=4, latent=8)]
)
def test_interpolations_end_in_samples(nets):
    model = model_of(nets, side=32 if isinstance(nets, SNGAN) else 8)
    between_latents, between_classes = interpolation_figures(make_samples(model))
    assert [one.name for one in (between_latents, between_classes)] == ["latents", "classes"]

    def sample(index, label):
        return model.sampler.images([index], np.array([label]), report_figures.SAMPLE_SEED)[0]

    first = between_latents.strips[0].images
    assert torch.equal(first[0], sample(0, 0))
    assert torch.equal(first[-1], sample(1, 0))
    strip = between_classes.strips[0]
    assert strip.caption == "c0 to c1"
    assert len(strip.images) == report_figures.INTERPOLATION_STEPS
    assert torch.equal(strip.images[0], sample(0, 0))
    assert torch.equal(strip.images[-1], sample(0, 1))
    assert not torch.equal(strip.images[3], strip.images[0])
    assert torch.equal(sample(0, 1), strip.images[-1])  # the embeddings are as they were


def test_class_interpolation_requires_embeddings():
    assert [one.name for one in interpolation_figures(make_samples(model_of(classes=0)))] == ["latents"]


@pytest.mark.parametrize(("side", "displayed"), [(8, 64), (48, 48), (200, 128)])
def test_strips_have_a_visible_size(side, displayed):
    strip = report_figures.ImageStrip(torch.zeros(6, 3, side, side, dtype=torch.uint8), "", "", gap_after_first=True)
    assert render_strip(strip).size == (6 * displayed + report_figures.GAP_PX, displayed)


def test_strips_keep_the_shape_of_images_and_show_three_channels():
    strip = report_figures.ImageStrip(torch.zeros(2, 5, 16, 48, dtype=torch.uint8), "", "")
    picture = render_strip(strip)
    assert picture.size == (2 * 128, 42)  # 48 x 16, enlarged four times, then reduced to 128 px
    assert picture.mode == "RGB"


def test_a_run_ends_with_figures_for_its_page(run):
    names = {file.name for file in (run / "figures").iterdir()}
    assert {"figures.json", "neighbors-00.png", "latents-03.png", "classes-00.png"} <= names
    assert not is_outdated(run, "pixels")
    assert is_outdated(run, "inception")
    page = write_report(run).read_text()
    for words in ("Nearest training images", "all 1,797 training images", "Between latents", "Between classes"):
        assert words in page


def test_report_remakes_figures_of_a_changed_model(run):
    weights = run / "model" / "model.safetensors"
    model = bytearray(weights.read_bytes())
    model[-3] ^= 1
    weights.write_bytes(model)
    config = json.loads((run / "model" / "config.json").read_text())
    (run / "model" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "crc32"}))
    (run / "figures" / "neighbors-77.png").touch()
    before = (run / "figures" / "figures.json").read_bytes()
    assert is_outdated(run, "pixels")
    assert run_cli("report", run, "--as-is").status == 0
    assert (run / "figures" / "figures.json").read_bytes() == before
    assert run_cli("report", run).status == 0
    assert not is_outdated(run, "pixels")
    assert not (run / "figures" / "neighbors-77.png").exists()


def test_missing_data_are_reported(run):
    shutil.rmtree(run / "figures")
    (run / "run.yaml").write_text((run / "run.yaml").read_text().replace("path: digits", "path: /nowhere/data.npz"))
    assert run_cli("report", run).status == 0
    page = (run / "report.html").read_text()
    assert "Nearest training images are not shown: " in page
    assert "/nowhere/data.npz" in page
    assert "Between latents" in page
    assert is_outdated(run, "pixels")
    assert run_cli("report", run, "--data", "digits").status == 0
    assert "are not shown" not in (run / "report.html").read_text()


def test_invalid_figures_raise_usage_errors(run):
    assert "did you mean" in usage_error("report", run, "--features", "pixel")
    assert "missing nowhere.pth" in usage_error("report", run, "--features", "inception", "--inception", "nowhere.pth")
    shutil.rmtree(run / "figures")
    assert "nowhere does not exist" in usage_error("report", run, "--data", "nowhere")
    (run / "model" / "config.json").write_text("{}")
    ended = run_cli("report", run)
    assert ended.status == 0
    assert f"{run}: no neighbors and interpolations: " in ended.err
    assert ended.err.count("\n") == 1


def test_neighbors_in_other_data_are_omitted(run):
    others = load_data("digits", resolution=16)
    with pytest.raises(Exception, match="space"):
        make_figures(run, dataclasses.replace(others, fingerprint=str(load_model(run).config["data"])))
    make_figures(run, others)
    index = json.loads((run / "figures" / "figures.json").read_text())
    assert index["missing_reasons"] == [
        "Nearest training images are not shown: the data there are not those that the model was trained on."
    ]


def test_a_large_dataset_is_sampled_with_a_note(run):
    make_figures(run, load_data("digits", resolution=8), max_search_values=64 * 500)
    assert (
        "500 of 1,797 training images"
        in json.loads((run / "figures" / "figures.json").read_text())["figures"][0]["description"]
    )
    assert is_outdated(run, "pixels")


def test_streamed_data_are_searched_by_the_command_only(tmp_path):
    digits = load_data("digits", resolution=8)
    save_images(digits.images[:60], digits.labels[:60] % 2, tmp_path / "photos")
    run = train_tiny(tmp_path / "run", "--kimg=0.032", f"--data={tmp_path}/photos", "--data.cache=stream")
    index = run / "figures" / "figures.json"
    assert (
        "the data are streamed; `paragan report` searches them" in json.loads(index.read_text())["missing_reasons"][0]
    )
    assert run_cli("report", run).status == 0
    index_data = json.loads(index.read_text())
    assert (index_data["missing_reasons"], index_data["thorough"]) == ([], True)
    assert "all 60 training images" in index_data["figures"][0]["description"]


@pytest.mark.parametrize("kind", ["numbers", "given"])
def test_models_without_images_from_latents_have_no_figures(kind, run, monkeypatch):
    model = load_model(run)
    if kind == "numbers":
        model = dataclasses.replace(model, spec=Spec(0, 0, 0, array_shape=(2,)))
    else:
        source = DataSource(tiny_run.make_dataset(), lambda real: real.images)
        model = dataclasses.replace(model, sampler=dataclasses.replace(model.sampler, source=source))
    monkeypatch.setattr(report_figures, "load_model", lambda *_: model)
    make_figures(run, tiny_run.make_dataset())
    assert [file.name for file in (run / "figures").iterdir()] == ["figures.json"]
    assert not is_outdated(run, "pixels")
    page = write_report(run).read_text()
    assert "Nearest" not in page
    assert "Between" not in page


def test_untrained_labels_are_left_out(tmp_path, monkeypatch):
    for page in ("write_report", "make_final_figures"):  # of each label
        monkeypatch.setattr(trainer, page, lambda *_: None)
    folder = train_tiny(tmp_path / "run", "--kimg=0.32", "--strategy=per-label", "--evaluation.metrics=[]")
    shutil.rmtree(folder / "model" / "0001")
    (folder / "labels.jsonl").unlink()
    (folder / "stats.jsonl").unlink()
    for fakes in folder.glob("fakes*.png"):
        fakes.unlink()
    (folder / "labels" / "0001").rename(folder / "labels" / "0001.2")
    shutil.rmtree(folder / "labels" / "0002")
    assert run_cli("report", folder).status == 0
    captions = [
        strip["caption"]
        for one in json.loads((folder / "figures" / "figures.json").read_text())["figures"]
        for strip in one["strips"]
    ]
    assert captions[0].startswith("0 · nearest at ")
    assert captions[1].startswith("2 · nearest at ")
    page = (folder / "report.html").read_text()
    assert "unfinished" in page
    assert "8 of 10 are done" in page
    assert page.count("generated samples of label") == 9
    assert page.count(">not begun<") == 1
    assert page.count(">begun<") == 1


def test_pictures_are_complete_pngs(run):
    for file in (run / "figures").glob("*.png"):
        with Image.open(file) as image:
            image.load()
            assert image.height == 64


def test_interpolated_latents_are_those_of_the_sampler():
    fakes = make_samples(model_of())
    ends = fakes.sampler.images(range(2, 4), np.full(2, 1), report_figures.SAMPLE_SEED)
    assert torch.equal(fakes.interpolate((2, 3), 1)[[0, -1]], ends)


@pytest.mark.parametrize("truncation", [0, -1, 2, float("nan")])
def test_a_truncation_out_of_range_raises(truncation):
    with pytest.raises(UsageError, match=r"between 0\.05 and 1"):
        sample_latent(0, 0, 4, truncation)
