"""Styles of a StyleGAN2: truncation, walks, mixed styles, and the style of a given image."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

import paragan
from advice import Case, advises, case_id, change
from paragan.core.errors import UsageError
from paragan.models.export_graph import SUFFIXES, export_graphs
from paragan.models.latent_walk import walk
from paragan.models.model import make_model_config, save_model
from paragan.models.sampler import LabelPrior
from paragan.models.style_space import mix_styles, project, style_sampler
from paragan.nets import DCGAN, Spec, StyleGAN2
from processes import run_cli, usage_error

NETS = StyleGAN2(channel_base=128, channel_max=16, latent=8, style=12, mapping_layers=2, mapping_lr=1.0)


def save(folder, nets, spec=None, classes=("ant", "cat")):
    torch.manual_seed(0)
    spec = spec or Spec(16, 3, len(classes))
    g = nets.generator(spec)
    if isinstance(nets, StyleGAN2):
        g.mapping(torch.randn(4000, 8), torch.arange(4000) % 2)
        g.mapping.average.decay = 0.0
        g.mapping.average.apply_synchronised()
        for layer in g.synthesis.layers:
            torch.nn.init.constant_(layer.noise_strength, 0.1)
        with torch.no_grad():
            for to_image in g.synthesis.images:  # images that are not clipped
                to_image.conv.weight *= 0.3
    prior = LabelPrior((0.5, 0.5))
    save_model(folder, g, None, make_model_config(nets, spec, prior, classes, kimg=1.0))
    return folder


@pytest.fixture(scope="module")
def styled(tmp_path_factory):
    return save(tmp_path_factory.mktemp("styled") / "model", NETS)


def test_truncation_pulls_styles_towards_their_mean(styled):
    model = paragan.load(styled)
    g = model.g
    z = model.sampler.source(range(6), 0, 1.0)
    y = torch.tensor([0, 1] * 3)
    w = g.mapping(z, y)
    expected = g.from_styles((0.3 * w + 0.7 * g.mapping.average.mean)[:, None].expand(-1, g.num_styles, -1), z)
    images = model.sample(6, labels=["ant", "cat"], truncation=0.3)
    assert np.abs(images.transpose(0, 3, 1, 2) - model.sampler.to_output(expected).numpy().astype(float)).max() <= 1
    full = model.sample(6, labels=["ant", "cat"])
    assert images.std(0).mean() < full.std(0).mean()


def test_a_walk_interpolates_styles(styled):
    model = paragan.load(styled)
    frames = walk(model, stops=3, frames_per_stop=4, seed=5, labels=["ant", "cat"])
    assert frames.shape == (12, 16, 16, 3)
    g, z = model.g, model.sampler.source(range(3), 5, 1.0)
    w = g.mapping(z, torch.tensor([0, 1, 0]))
    halfway = g.from_styles((0.5 * (w[1] + w[2])).expand(1, g.num_styles, -1))
    expected = model.sampler.to_output(halfway)[0].permute(1, 2, 0).numpy()
    assert np.abs(frames[6].astype(float) - expected).max() <= 1
    last = g.from_styles((0.25 * w[2] + 0.75 * w[0]).expand(1, g.num_styles, -1))
    assert np.abs(frames[11].astype(float) - model.sampler.to_output(last)[0].permute(1, 2, 0).numpy()).max() <= 1


def test_mixed_styles_share_rows_and_columns(styled):
    model = paragan.load(styled)
    sheet = mix_styles(model, rows=2, columns=3, from_layer=2, seed=1).reshape(3, 4, 16, 16, 3)
    g = model.g
    w = g.mapping(model.sampler.source(range(5), 1, 1.0), torch.from_numpy(model.labels(5, seed=1)))
    ws = torch.cat([w[1].expand(2, -1), w[4].expand(g.num_styles - 2, -1)])
    expected = model.sampler.to_output(g.from_styles(ws[None]))[0].permute(1, 2, 0).numpy()
    assert np.abs(sheet[2, 3].astype(float) - expected).max() <= 1
    of_row = model.sampler.to_output(g.from_styles(w[1].expand(1, g.num_styles, -1)))[0].permute(1, 2, 0).numpy()
    assert np.abs(sheet[2, 0].astype(float) - of_row).max() <= 1


@pytest.mark.slow
def test_the_style_of_an_image_of_the_model_is_found(styled, tmp_path):
    model = paragan.load(styled)
    g = model.g
    w = g.mapping(model.sampler.source([77], 0, 1.0), torch.tensor([1]))
    with torch.no_grad():
        images = model.sampler.to_output(g.from_styles(w[:, None].expand(-1, g.num_styles, -1)))
    target = images[0].permute(1, 2, 0).numpy()
    start, found = (project(model, target, steps=steps, label="cat") for steps in (1, 150))
    assert found.psnr_db > max(22, start.psnr_db + 6)
    assert found.styles.shape == (g.num_styles, 12)
    assert project(model, target, steps=20).psnr_db == project(model, target, steps=20).psnr_db
    Image.fromarray(target).save(tmp_path / "target.png")
    result = run_cli("project", str(styled), str(tmp_path / "target.png"), "--steps=20", f"--out={tmp_path / 'out'}")
    assert result.status == 0, result
    assert "step 20 of 20: distance " in result.out
    assert np.load(tmp_path / "out" / "styles.npz")["styles"].shape == (g.num_styles, 12)
    with Image.open(tmp_path / "out" / "target.png") as picture:
        assert np.array_equal(np.array(picture), target)


def test_commands(styled, tmp_path):
    out = tmp_path / "mixed.png"
    assert run_cli("sample", str(styled), "--mix=2x3", f"--out={out}", "--truncation=0.7").status == 0
    with Image.open(out) as picture:
        assert picture.size == (4 * 64 + 3 * 2, 3 * 64 + 2 * 2)


@pytest.mark.parametrize(
    "case",
    [
        *[
            Case(
                f"sample MODEL --mix={value} --out=OUT.png",
                "is no size of a grid. Use 4x6, each 1 to 64",
                ("--mix=4x6",),
            )
            for value in ("2", "0x3", "axb", "2x65", "1x2x3")
        ],
        Case(
            "sample MODEL --mix=2x2 --mix-from=6 --out=OUT.png",
            "--mix-from 6: the model has 6 layers. Use 1 to 5",
            ("--mix-from=1", "--mix-from=5"),
        ),
        Case("sample MODEL --mix=2x2 --out=OUT.npz", "mixed styles are a picture. Use mixed.png", ("--out=OUT.png",)),
        Case(
            "sample MODEL --mix=2x2 --labels=ant --out=OUT.png",
            "--labels: mixed styles are of classes as often as in the data. Leave it out",
            ("~labels",),
        ),
        Case(
            "project MODEL IMAGE.png --steps=0 --out=OUT", "--steps 0: must be positive. Use 1 or more", ("--steps=1",)
        ),
        Case(
            "project MODEL IMAGE.png --steps=1 --out=FULL",
            "exists and is not an empty folder. Use another name",
            ("--out=OUT",),
        ),
        Case(
            "project MODEL IMAGE.txt --steps=1 --out=OUT",
            "). Use a PNG or JPEG",
            ("~IMAGE.txt IMAGE.png",),
        ),
    ],
    ids=case_id,
)
def test_refused_command_lines(styled, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL").symlink_to(styled)
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save("IMAGE.png")
    (tmp_path / "IMAGE.txt").write_text("no picture")
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "file").touch()
    assert case.advice in usage_error(*case.arguments.split())
    for follow in case.follow:
        arguments = change(case.arguments.split(), follow)
        assert run_cli(*arguments).status == 0


def test_a_model_of_other_channels_cannot_read_pictures(tmp_path):
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.png")
    nets, out = dataclasses.replace(NETS, style_mixing=0.0), f"--out={tmp_path / 'out'}"
    of_two, of_one = (save(tmp_path / f"{n}", nets, Spec(8, n, 2)) for n in (2, 1))
    with advises("project: the model makes images of 2 channels. Use a model of 1 or 3 channels"):
        raise UsageError(usage_error("project", str(of_two), str(tmp_path / "a.png"), "--steps=1", out))
    assert run_cli("project", str(of_one), str(tmp_path / "a.png"), "--steps=1", out).status == 0


def test_models_without_styles_and_other_sizes_are_refused(styled, tmp_path):
    plain = paragan.load(save(tmp_path / "plain", DCGAN(width=4, latent=8), Spec(8, 1, 2)))
    with advises("this model has no styles. Use a model that was trained with --nets=stylegan2 or --nets=gat"):
        project(plain, np.zeros((8, 8, 1), np.uint8))
    with advises(
        "is [height, width, channels] [16, 8, 1], and the model makes 16 x 16 with 3 channels. Resize it to 16x16"
    ):
        project(paragan.load(styled), np.zeros((16, 8, 1), np.uint8))
    assert project(paragan.load(styled), np.zeros((16, 16, 3), np.uint8), steps=1).image.shape == (16, 16, 3)
    assert style_sampler(paragan.load(styled), "").has_styles


@pytest.mark.slow
@pytest.mark.parametrize("graph_format", ["onnx", "torch-export"])
def test_a_graph_has_fixed_noise(styled, graph_format, tmp_path):
    out = tmp_path / f"g{SUFFIXES[graph_format]}"
    export_graphs(paragan.load(styled), graph_format, out)  # compares images with those of the network
    assert out.stat().st_size > 10_000
