"""Frozen autoencoders: they undo what they did, are recognised by their weights, and draw no random numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from advice import advises
from paragan.core.errors import UsageError
from paragan.core.image_encoding import ImageEncoding, is_user_code
from paragan.data.dataset import load_data
from paragan.data.loader.device_transfer import to_model_input
from paragan.models.autoencoder import LatentDecoder, load_autoencoder, load_decoder, state_fingerprint
from paragan.models.encode_dataset import normalisation
from paragan.models.sampler import to_uint8
from tiny_autoencoder import USER_MODULE, forget_loaded_autoencoders, save_autoencoder


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_latents.py").write_text(USER_MODULE)
    forget_loaded_autoencoders()


def digits() -> torch.Tensor:
    pixels = torch.from_numpy(load_data("digits", resolution=8).images[:64])
    return to_model_input(pixels, torch.contiguous_format)


def encoding_of(reference: str, latents: torch.Tensor) -> ImageEncoding:
    mean, std = normalisation(latents.numpy())
    fingerprint = load_autoencoder(reference, "--encoder").fingerprint
    return ImageEncoding(reference, fingerprint, mean, std, (1, 8, 8), "digits", "0")


@pytest.mark.parametrize("quantizer", ["vq", "fsq", "kl"])
@torch.no_grad()
def test_decoded_latents_are_the_output_of_the_autoencoder(quantizer, tmp_path):
    net = load_autoencoder(str(save_autoencoder(tmp_path / "tok", quantizer)), "--encoder").net
    images = digits()
    latents = net.to_latents(images)
    assert latents.shape == (64, 3 if quantizer == "fsq" else 2, 4, 4)
    output = net(images).images
    assert torch.equal(net.from_latents(latents), output)
    encoding = encoding_of("tok", latents)
    normalised = (latents - torch.tensor(encoding.mean)[:, None, None]) / torch.tensor(encoding.std)[:, None, None]
    assert normalised.std((0, 2, 3)).allclose(torch.ones(()), atol=1e-2)
    decoder = load_decoder(encoding)
    assert decoder(normalised).allclose(output, atol=1e-5)  # the normalisation rounds
    difference = decoder.to_pixels(normalised).int() - to_uint8(output).int()
    assert difference.abs().max() <= 1


def test_latents_of_a_gaussian_are_its_mean_and_draw_nothing(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    net = load_autoencoder(str(save_autoencoder(tmp_path / "tok")), "--encoder").net
    torch.set_rng_state(before)
    net = load_autoencoder("tok", "--encoder").net
    assert torch.equal(net.to_latents(digits()), net.encode(digits()).mean)
    assert torch.equal(torch.get_rng_state(), before)  # a run may load it at any moment
    assert not any(parameter.requires_grad for parameter in net.parameters())


def test_an_autoencoder_is_recognised_by_its_weights_wherever_it_lies(tmp_path):
    encoding = encoding_of(str(save_autoencoder(tmp_path / "tok")), torch.zeros(2, 2, 4, 4))
    load_decoder(encoding)
    (tmp_path / "tok").rename(tmp_path / "moved")
    forget_loaded_autoencoders()
    with advises("tok: does not exist. Use a run folder of `paragan train`"):
        load_decoder(encoding)
    moved = dataclasses.replace(encoding, decoder=str(tmp_path / "moved"))
    assert isinstance(load_decoder(moved), LatentDecoder)
    save_autoencoder(tmp_path / "moved", seed=1)
    forget_loaded_autoencoders()
    with advises("Use --data.decoder=PATH of a copy of it, or encode the images again"):
        load_decoder(moved)
    save_autoencoder(tmp_path / "copy")
    load_decoder(dataclasses.replace(encoding, decoder="copy"))


def test_the_fingerprint_is_of_values_names_and_types():
    layers = [torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))]
    layers[1][0].load_state_dict(layers[0].state_dict())
    changed = torch.nn.Linear(2, 2)
    changed.load_state_dict(layers[0].state_dict())
    assert state_fingerprint(changed) == state_fingerprint(layers[0])
    changed.weight.data[1, 1] += 1
    prints = {state_fingerprint(net) for net in (*layers, changed)} | {state_fingerprint(changed.double())}
    assert len(prints) == 4


def test_what_is_no_autoencoder_is_refused(per_label, small):
    with pytest.raises(UsageError, match="has no to_latents and from_latents"):
        load_autoencoder(str(small), "--encoder")
    with advises(
        "--encoder=mine_latents:Deaf: Deaf has no to_latents and from_latents. Use a run of `paragan train tokenizer`, "
        "or module:Class of an nn.Module that has them"
    ):
        load_autoencoder("mine_latents:Deaf", "--encoder")
    load_autoencoder("mine_latents:Halves", "--encoder")
    with advises("has a generator for each label. Use a run of `paragan train tokenizer`"):
        load_autoencoder(str(per_label), "--encoder")


def test_a_class_is_told_from_a_folder():
    assert is_user_code("mine:Autoencoder")
    assert is_user_code("package.mine:Autoencoder")
    for name in ("runs/tok", "tok", "s3://bucket/tok", "C:/tok", "a b:c"):
        assert not is_user_code(name)
