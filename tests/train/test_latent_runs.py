"""Runs on latents: samples are decoded, scores compare them with the images, and a resume is bit-identical."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import paragan
import tiny_run
from advice import advises
from paragan.config.resolve import load_dataset
from paragan.config.run import Run
from paragan.config.sections import DataOptions
from paragan.core.errors import UsageError
from paragan.core.image_grid import GAP_PX
from paragan.core.jsonl import read_jsonl
from paragan.core.schema import from_dict
from paragan.data.dataset import load_data
from paragan.models.autoencoder import load_autoencoder
from paragan.train.prepare import prepare
from processes import call_command, on_step, run_cli, usage_error
from tiny_autoencoder import USER_MODULE, forget_loaded_autoencoders, save_autoencoder

GAT = [
    *("--nets=gat", "--nets.patch=1", "--nets.width=8", "--nets.depth=2", "--nets.heads=1", "--nets.stages=1"),
    *("--nets.latent=4", "--objective.loss=relativistic", "--batch=16", "--lanes=2", "--output.tick_kimg=0.016"),
    *("--evaluation.metrics=[fd]", "--evaluation.count=16", "--device.threads=1", "--device.precision=float32"),
]
SHORT = "--kimg=0.048"
SCALE = 8  # of the pixels in a grid


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """A folder with an autoencoder, 120 images and their latents."""
    monkeypatch.chdir(tmp_path)
    forget_loaded_autoencoders()
    save_autoencoder(Path("tok"))
    digits = load_data("digits", resolution=8)
    rows = np.flatnonzero(digits.labels < 3)[:120]
    np.savez("few.npz", images=digits.images[rows], labels=digits.labels[rows], classes=["a", "b", "c"])
    encode()
    return tmp_path


@pytest.fixture
def trained(work) -> Path:
    """The same, and a run on the latents."""
    train("run")
    forget_loaded_autoencoders()
    return work


def encode(encoder: str = "tok") -> None:
    Path("latents.npz").unlink(missing_ok=True)
    result = run_cli("data", "encode", "few.npz", "latents.npz", "--encoder", encoder)
    assert result.status == 0, result.err


def train_args(folder: str, *more: str) -> list[str]:
    return ["train", "custom", "--data=latents.npz", *GAT, SHORT, f"--run-dir={folder}", *more]


def train(folder: str, *more: str) -> str:
    result = run_cli(*train_args(folder, *more))
    assert result.status == 0, result.err
    return result.out


def weights(folder: str) -> bytes:
    return Path(folder, "model/model.safetensors").read_bytes()


def test_samples_are_decoded_latents(trained):
    model = paragan.load("run")
    assert repr(model).startswith("Model(1x8x8, 3 classes")
    samples = model.sample(5, labels=[1, 2])
    assert samples.shape == (5, 8, 8, 1)
    assert samples.dtype == np.uint8
    encoding = load_dataset(DataOptions("latents.npz")).encoding
    assert encoding
    z, y = model.sampler.source(range(5), 0, 1.0), torch.tensor([1, 2, 1, 2, 1])
    latents = model.g(z, y) * torch.tensor(encoding.std)[:, None, None] + torch.tensor(encoding.mean)[:, None, None]
    images = load_autoencoder("tok", "--encoder").net.from_latents(latents)
    expected = images.add(1).mul(127.5).round().clamp(0, 255).permute(0, 2, 3, 1)
    assert np.array_equal(samples, expected.detach().numpy().astype(np.uint8))


def test_grids_are_of_images_and_reals_are_decoded(trained):
    for name in ("fakes000000.png", "reals.png"):
        with Image.open(f"run/{name}") as grid:
            assert (grid.width + GAP_PX) % 3 == 0, name  # three classes
            assert (grid.width + GAP_PX) // 3 - GAP_PX == 8 * SCALE, name
    first = load_data("few.npz", resolution=8)
    x = torch.from_numpy(first.images[first.labels == 0][:1]).permute(0, 3, 1, 2) / 127.5 - 1
    decoded = load_autoencoder("tok", "--encoder").net(x).images[0, 0].add(1).mul(127.5).round().clamp(0, 255)
    with Image.open("run/reals.png") as grid:
        corner = np.asarray(grid.convert("L")).astype(int)[: 8 * SCALE : SCALE, : 8 * SCALE : SCALE]
    assert np.abs(corner - decoded.detach().numpy()).max() <= 1


def test_scores_compare_decoded_samples_with_the_images(trained):
    (row,) = read_jsonl(Path("run/metrics.jsonl"))
    assert row["protocol"]["data"] == f"{load_data('few.npz', resolution=8).fingerprint} 8x8x1, square crop, Lanczos"
    np.savez("fakes.npz", images=paragan.load("run").sample(16))
    assert (
        run_cli(
            *["eval", "--reals", "few.npz", "--fakes", "fakes.npz", "--metrics", "fd", "--json", "scores.json"]
        ).status
        == 0
    )
    (score,) = json.loads(Path("scores.json").read_text())["scores"]
    assert row["value"] == pytest.approx(score["value"], rel=1e-6)


def test_other_commands_see_images(trained):
    assert "16 images in" in run_cli("sample", "run", "--count=16", "--out=grid.png").out
    assert run_cli("sample", "run", "--video=walk.gif", "--seconds=1", "--fps=4", "--stops=2").status == 0
    assert run_cli("eval", "run", "--metrics=prdc", "--count=16").status == 0
    assert run_cli("eval", "run", "--metrics=fd", "--count=16", "--data=few.npz").status == 0
    rows = [row for row in read_jsonl(Path("run/metrics.jsonl")) if row["name"] == "fd_pixels"]
    assert rows[-1]["value"] == rows[0]["value"]
    assert run_cli("eval", "run/model", "--metrics=fd", "--count=16", "--data=few.npz").status == 0
    assert run_cli("eval", "run", "--metrics=kid", "--count=16", "--follow").status == 0
    assert run_cli("report", "run").status == 0
    assert run_cli("export", "run", "--out=exported").status == 0
    card = Path("exported/README.md").read_text()
    assert "images of 8 x 8 x 1" in card
    assert f"It makes latents, which `{Path('tok').absolute()}` decodes" in card
    assert np.array_equal(paragan.load("exported").sample(4), paragan.load("run").sample(4))
    with advises("makes latents, and a graph has no decoder. Use --format safetensors"):
        call_command("export", "run", "--format=torch-export", "--out=g.pt2")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("x.png")
    with advises("projecting an image: the model makes latents. Use a model of images"):
        call_command("project", "run", "x.png", "--out=projected", "--steps=1")


def test_an_interrupted_run_ends_as_an_undisturbed_one(trained):
    with on_step(1, lambda session: signal.raise_signal(signal.SIGTERM)):
        assert run_cli(*train_args("other")).status == 3
    forget_loaded_autoencoders()
    torch.manual_seed(7)
    train("other")
    assert weights("other") == weights("run")
    assert Path("other/reals.png").read_bytes() == Path("run/reals.png").read_bytes()
    assert Path("other/fakes000000.png").read_bytes() == Path("run/fakes000000.png").read_bytes()


def test_a_decoder_that_moved_is_named(trained):
    Path("tok").rename("moved")
    forget_loaded_autoencoders()
    for command in (["sample", "run", "--count=1", "--out=a.png"], ["eval", "run"], train_args("new")):
        assert f"data.decoder={Path('tok').absolute()}: " in usage_error(*command)
        assert not Path("new").exists()
    assert run_cli("sample", "run", "--count=1", "--out=a.png", "--decoder=moved").status == 0
    assert run_cli("eval", "run", "--metrics=fd", "--count=16", "--decoder=moved").status == 0
    train("run", "--data.decoder=moved", "--kimg=0.064")  # a resume too
    assert paragan.load("run", decoder="moved").sample(1).shape == (1, 8, 8, 1)


def test_a_decoder_that_changed_is_refused(trained):
    save_autoencoder(Path("tok"), seed=1)
    for command in (["sample", "run", "--count=1", "--out=a.png"], ["eval", "run"], train_args("new")):
        assert "tok: has other weights (" in usage_error(*command)


def test_other_latents_are_another_run(trained):
    save_autoencoder(Path("tok"), seed=1)
    encode()
    assert "data" in usage_error(*train_args("run", "--kimg=0.064"))


def test_the_images_are_needed_for_scores_alone(trained):
    Path("few.npz").rename("moved.npz")
    message = usage_error(*train_args("new"))
    assert "data.originals: scores need the images that" in message
    assert "few.npz does not exist" in message
    with advises("Use --data.originals=PATH, or --evaluation.metrics=[]"):
        call_command(*train_args("new"))
    train("new", "--evaluation.metrics=[]")
    train("other", "--data.originals=moved.npz")
    assert read_jsonl(Path("other/metrics.jsonl"))[0]["value"] == read_jsonl(Path("run/metrics.jsonl"))[0]["value"]
    moved = load_data("moved.npz", resolution=8)
    np.savez("few.npz", images=moved.images[::-1], labels=moved.labels, classes=moved.classes)
    assert "few.npz has changed since" in usage_error(*train_args("changed"))


def test_data_that_is_no_encoded_images_is_refused(work):
    content = dict(np.load("latents.npz"))
    del content["encoding"]
    np.savez("plain.npz", **content)
    with advises("Use networks of your own"):
        call_command(*train_args("new", "--data=plain.npz"))
    with advises(
        f"data.decoder={work}/tok: is for latents that `paragan data encode` wrote, and {work}/plain.npz holds none. "
        "Leave it out"
    ):
        call_command(*train_args("new", "--data=plain.npz", "--data.decoder=tok"))
    with pytest.raises(UsageError, match="holds none"):
        call_command(*train_args("new", "--data=few.npz", "--data.originals=few.npz"))
    with advises("data.decoder=tok: tok makes no latents. Leave it out"):
        paragan.load("tok", dataset=load_data("few.npz", resolution=8), decoder="tok")
    paragan.load("tok", dataset=load_data("few.npz", resolution=8))


def test_code_of_the_user_runs_only_where_the_user_names_it(work, monkeypatch):
    monkeypatch.syspath_prepend(work)
    Path("mine_decoder.py").write_text(USER_MODULE)
    name = "mine_decoder:Halves"
    encode(name)
    with advises(
        f"data: {work}/latents.npz: encoded by your own {name}, which files never run. Use --data.decoder={name}"
    ):
        call_command(*train_args("new"))
    train("new", f"--data.decoder={name}")
    sample = ["sample", "new", "--count=1", "--out=a.png"]
    with advises(f"new/model: makes latents of your own {name}, which files never run. Use --data.decoder={name}"):
        call_command(*sample)
    assert run_cli(*sample, f"--data.decoder={name}").status == 0
    assert "which files never run" in usage_error("eval", "new", "--metrics=fd", "--count=16")
    assert run_cli("eval", "new", "--metrics=fd", "--count=16", "--decoder", name).status == 0


def test_latents_that_were_opened_without_their_options_are_refused(work):
    run = from_dict(
        Run, {"data": {"path": "latents.npz"}, "nets": {"name": "gat", "patch": 1, "width": 24, "stages": 1}}
    )
    with advises(
        f"dataset: latents of {work}/tok need their options. Use paragan.DataOptions(path) as data, and leave dataset "
        "out"
    ):
        prepare(run, dataset=load_data("latents.npz", resolution=None))
    assert prepare(run).spec.sample_spec.shape == (1, 8, 8)


def test_statistics_stand_for_the_images(trained):
    assert run_cli("data", "stats", "few.npz", "--out=stats.npz", "--resolution=8").status == 0
    Path("few.npz").unlink()
    assert run_cli("eval", "run", "--metrics=fd", "--count=16", "--reference=stats.npz").status == 0
    first, last = read_jsonl(Path("run/metrics.jsonl"))
    assert last["value"] == pytest.approx(first["value"], rel=1e-6)


def test_a_run_of_one_class_is_scored_against_its_images(work):
    train("one", "--data.only=1")
    (row,) = read_jsonl(Path("one/metrics.jsonl"))
    assert row["protocol"]["reals"] == np.count_nonzero(np.load("few.npz")["labels"] == 1)
    train("unlabelled", "--data.labels=false")
    assert read_jsonl(Path("unlabelled/metrics.jsonl"))[0]["protocol"]["reals"] == 120


def test_a_run_per_label_decodes_too(work):
    train("labels", "--strategy=per-label", "--batch=2", "--kimg=0.02")
    assert paragan.load("labels").sample(3, labels=[1]).shape == (3, 8, 8, 1)
    assert read_jsonl(Path("labels/metrics.jsonl"))


def test_two_ranks_train_as_one(work, pool):
    run = tiny_run.make_run(
        *(argument.removeprefix("--") for argument in GAT if not argument.startswith("--output")),
        *(f"data.path={work}/latents.npz", "data.resolution=0", "data.channels=0", "g.optimizer.eps=1e-3"),
        "d.optimizer.eps=1e-3",
    )
    one = tiny_run.play_rounds(run, 4)
    other = pool(2, lambda world: tiny_run.play_rounds(run, 4, world))[0]
    assert tiny_run.relative_distance(other, one, "G/") < 2e-4


EDM = ("--nets.widths=[8, 8]", "--nets.blocks=1", "--nets.latent=16", "--batch=16", "--device.threads=1")


def test_a_student_learns_on_the_latents_of_its_teacher(work):
    diffusion = run_cli(
        "train", "diffusion", "--data=latents.npz", *EDM, SHORT, "--evaluation.metrics=[]", "--run-dir=t"
    )
    assert diffusion.status == 0, diffusion.err
    with np.load("latents.npz") as archive:
        arrays = dict(archive)
    encoding = json.loads(str(arrays["encoding"]))
    arrays["encoding"] = np.array(json.dumps(encoding | {"mean": [mean + 1 for mean in encoding["mean"]]}))
    np.savez("shifted.npz", **arrays)

    nets = {"name": "edm", "steps": 1, "critic": "score"}

    def distill(data: str) -> Run:
        settings = {"data": {"path": data}, "distill_from": "t", "objective": "distribution_matching", "nets": nets}
        return prepare(from_dict(Run, settings)).run

    with advises(". Use the data that it was trained on"):
        distill("shifted.npz")
    with pytest.raises(UsageError, match=r"distill_from=t: makes latents of .*, and the data are images"):
        distill("few.npz")
    assert distill("latents.npz").distill_from == "t"
