"""`paragan data encode`: latents depend on their image alone, keep labels, and say how they were made."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from advice import advises
from paragan.data.dataset import load_data
from paragan.models.autoencoder import load_autoencoder, load_decoder
from paragan.models.encode_dataset import encode_images, normalisation
from processes import call_command, run_cli, usage_error
from tiny_autoencoder import USER_MODULE, forget_loaded_autoencoders, save_autoencoder


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_latents.py").write_text(USER_MODULE)
    forget_loaded_autoencoders()
    save_autoencoder(tmp_path / "tok")
    images = load_data("digits", resolution=8)
    np.savez("few.npz", images=images.images[:100], labels=images.labels[:100], classes=images.classes)


def encode(*arguments: str) -> None:
    result = run_cli("data", "encode", *arguments)
    assert result.status == 0, result.err


def latents_of(name: str) -> np.ndarray:
    dataset = load_data(name, resolution=8)
    return encode_images(dataset, load_autoencoder("tok", "--encoder"), torch.device("cpu"), lambda done, count: None)


def test_the_file_holds_normalised_latents_labels_and_what_decodes_them():
    encode("few.npz", "latents.npz", "--encoder", "tok")
    images, latents = load_data("few.npz", resolution=8), load_data("latents.npz", resolution=None)
    assert latents.shape == (2, 4, 4)
    assert latents.is_array
    assert latents.shows_images
    assert latents.sample_shape == images.shape
    assert (latents.labels == images.labels).all()
    assert latents.classes == images.classes
    assert not any("ignored" in note for note in latents.notes)
    encoding = latents.encoding
    assert encoding
    assert encoding.images_fingerprint == images.fingerprint
    assert np.allclose(latents.images.mean((0, 2, 3)), 0, atol=1e-6)
    assert np.allclose(latents.images.std((0, 2, 3)), 1, atol=1e-5)
    net = load_autoencoder("tok", "--encoder").net
    x = torch.from_numpy(images.images).permute(0, 3, 1, 2) / 127.5 - 1
    decoded = load_decoder(encoding)(torch.from_numpy(latents.images))
    assert decoded.allclose(net(x).images, atol=1e-4)


def test_latents_depend_on_their_image_alone():
    dataset = load_data("few.npz", resolution=8)
    np.savez("tail.npz", images=dataset.images[70:])
    assert np.array_equal(latents_of("few.npz")[70:], latents_of("tail.npz"))  # in another place of another batch


def test_equal_images_give_equal_files():
    encode("few.npz", "a.npz", "--encoder", "tok")
    encode("few.npz", "b.npz", "--encoder", "tok")
    a, b = np.load("a.npz"), np.load("b.npz")
    assert a.files == b.files
    assert all(np.array_equal(a[name], b[name]) for name in a.files)


def test_a_constant_channel_is_not_divided_by_zero():
    mean, std = normalisation(np.stack([np.full((3, 2, 2), 7.0), np.arange(12.0).reshape(3, 2, 2)], 1))
    assert mean[0] == 7
    assert std[0] == 1
    assert std[1] == pytest.approx(np.arange(12).std())


def test_a_module_of_the_user_encodes_at_any_size():
    encode("few.npz", "latents.npz", "--encoder", "mine_latents:Halves", "--resolution", "16", "--no-labels")
    latents = load_data("latents.npz", resolution=None)
    assert latents.shape == (4, 8, 8)
    assert latents.encoding
    assert latents.encoding.image_shape == (1, 16, 16)
    assert latents.encoding.std[0] == pytest.approx(3 * np.std(latents_as_pixels(latents)), rel=1e-4)
    assert latents.labels is None


def latents_as_pixels(latents) -> np.ndarray:
    """The first of four pixels of each square, in [-1, 1]."""
    encoding = latents.encoding
    return (latents.images[:, 0] * encoding.std[0] + encoding.mean[0]) / 3


def test_images_of_another_size_or_kind_are_refused():
    arguments = ("data", "encode", "few.npz", "latents.npz", "--encoder", "tok")
    with advises("--resolution=16: tok was trained on 8. Leave it out"):
        call_command(*arguments, "--resolution=16")
    with advises("--channels=3: tok was trained on 1. Leave it out"):
        call_command(*arguments, "--channels=3")
    encode(*arguments[2:])
    with advises("latents.npz exists already: name a new one, or remove it first"):
        call_command(*arguments)
    with advises("holds numbers, not images. Leave data.resolution"):
        call_command("data", "encode", "latents.npz", "again.npz", "--encoder", "tok")
    with advises("holds numbers or records. Use images"):
        call_command("data", "encode", "latents.npz", "again.npz", "--encoder", "mine_latents:Halves")
    with advises("latents are written as .npz. Use a name such as latents.npz"):
        call_command("data", "encode", "few.npz", "latents", "--encoder", "tok")
    assert "tok2: does not exist" in usage_error("data", "encode", "few.npz", "again.npz", "--encoder", "tok2")


def test_a_module_that_does_not_keep_the_rules_is_refused():
    def call(name: str, *more: str) -> None:
        call_command("data", "encode", "few.npz", "latents.npz", "--encoder", f"mine_latents:{name}", *more)

    with advises("--encoder: to_latents returned torch.float32 [64, 64]. Return floats [N, c, h, w]"):
        call("Flat")
    with advises("from_latents returned [64, 1, 8, 4] for images [64, 1, 8, 8]. Return these"):
        call("Cropped")
    with advises("Use --resolution and --channels of its images"):
        call("Halves", "--resolution=9")
    with advises("latents of images 0 to 63 are NaN or infinite. Use another one"):
        call("Infinite")
    call("Halves", "--resolution=8")


@pytest.mark.parametrize(
    "encoding",
    [
        np.array("{"),
        np.array([1, 2]),
        np.array("[1]"),
        np.array(json.dumps({"decoder": "tok"})),
        np.array("[" * 100_000),
        np.array("x" * 300_000),
    ],
)
def test_a_damaged_encoding_is_one_line(encoding):
    encode("few.npz", "latents.npz", "--encoder", "tok")
    content = dict(np.load("latents.npz"))
    np.savez("damaged.npz", **(content | {"encoding": encoding}))
    with advises("Write the file again with `paragan data encode`"):
        load_data("damaged.npz", resolution=None)


def test_an_encoding_of_other_channels_is_refused():
    encode("few.npz", "latents.npz", "--encoder", "tok")
    content = dict(np.load("latents.npz"))
    np.savez("damaged.npz", **(content | {"x": content["x"][:, :1]}))
    with advises("Write the file again with `paragan data encode`"):
        load_data("damaged.npz", resolution=None)
