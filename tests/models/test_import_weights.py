"""Networks of BigGAN-PyTorch and StudioGAN, imported, against plain forward passes on their own state dicts."""

from __future__ import annotations

import dataclasses
import pickle
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

import paragan
from advice import advises
from models import reference_models as theirs
from models.reference_models import ReferenceConfig
from paragan.core.errors import UsageError
from paragan.core.schema import from_dict, to_yaml
from paragan.models.import_weights import import_weights
from paragan.models.layer_names import LIBRARIES, translate_names
from paragan.models.model_files import read_consistent
from paragan.models.read_weights import read_tensors
from paragan.nets import Nets
from processes import run_cli, usage_error

KINDS = {  # what is imported: its family here
    "biggan": (ReferenceConfig("biggan-pytorch", 32, 4, 7, 12), "biggan"),
    "biggan-128": (ReferenceConfig("biggan-pytorch", 128, 8, 3, 24, attention=(3, 0)), "biggan"),
    "biggan-64-own": (ReferenceConfig("biggan-pytorch", 64, 4, 3, 9, conditioning="own", attention=(-1, -1)), "sagan"),
    "biggan-own": (ReferenceConfig("biggan-pytorch", 32, 4, 3, 9, conditioning="own", attention=(-1, -1)), "sagan"),
    "biggan-plain": (ReferenceConfig("biggan-pytorch", 32, 4, 7, 12, spectral=False, attention=(-1, -1)), "biggan"),
    "studiogan-biggan": (ReferenceConfig("studiogan", 32, 4, 7, 12), "biggan"),
    "studiogan-biggan-128": (ReferenceConfig("studiogan", 128, 8, 3, 24, attention=(3, 0)), "biggan"),
    "studiogan-contragan": (ReferenceConfig("studiogan", 32, 4, 7, 12, head="2C"), "contragan"),
    "studiogan-sagan": (ReferenceConfig("studiogan", 32, 4, 7, 9, conditioning="own"), "sagan"),
    "studiogan-sagan-128": (ReferenceConfig("studiogan", 128, 8, 3, 9, conditioning="own", attention=(3, 0)), "sagan"),
    "studiogan-acgan": (
        ReferenceConfig("studiogan", 64, 8, 3, 9, conditioning="own", head="AC", attention=(2, 0)),
        "sagan",
    ),
    "studiogan-sngan": (ReferenceConfig("studiogan", 32, 4, 7, 9, "own", "PD", (-1, -1), False), "sngan"),
    "studiogan-sngan-128": (ReferenceConfig("studiogan", 128, 2, 3, 9, "own", "PD", (-1, -1), False), "sngan"),
    "studiogan-sngan-alone": (ReferenceConfig("studiogan", 32, 4, 0, 9, "none", "W/O", (-1, -1), False), "sngan"),
}


def write_files(folder, of: ReferenceConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write g.pth and d.pth. Returns their state dicts."""
    g, d = theirs.make_generator_state(of), theirs.make_discriminator_state(of)
    torch.save(g if of.is_biggan else {"state_dict": g, "step": 100, "run_name": "x"}, folder / "g.pth")
    torch.save({f"module.{name}": value for name, value in d.items()}, folder / "d.pth")
    return g, d


@pytest.mark.slow(after=5)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_images_and_logits_are_equal(tmp_path, kind):
    of, family = KINDS[kind]
    g, d = write_files(tmp_path, of)
    model = import_weights(tmp_path / "g.pth", of.library, tmp_path / "out", tmp_path / "d.pth")
    assert (model.config["net"]["name"], model.spec.resolution, model.spec.classes) == (
        family,
        of.resolution,
        of.classes,
    )
    g, d = to_double(g), to_double(d)
    z, y = torch.randn(3, of.latent, dtype=torch.float64), torch.randint(max(of.classes, 1), (3,))
    expected = theirs.generate(of, g, z, y)
    actual = model.sampler.g.double()(z, y)
    assert expected.std() > 0.1  # tanh is not saturated
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    output = load_discriminator(tmp_path / "out", model).double()(expected, y)
    for name, value in theirs.discriminate(of, d, expected, y).items():
        actual = output if isinstance(output, Tensor) else getattr(output, name)
        torch.testing.assert_close(actual, value, atol=1e-5, rtol=1e-5)


def to_double(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in state.items()}


def load_discriminator(folder, model):
    nets = from_dict(Nets, model.config["net"])
    d = nets.discriminator(model.spec).eval()
    read_consistent(folder).load_into(d, "discriminator")
    return d


# The table -------------------------------------------------------------------------------------------

NAMES = {  # library, in D?: theirs -> ours
    ("biggan-pytorch", False): {
        "shared.weight": "conditions.shared.weight",
        "linear.u0": "start.u",
        "linear.sv0": "",
        "blocks.0.0.bn1.gain.weight": "blocks.0.norm1.gain.weight",
        "blocks.0.0.bn1.stored_mean": "blocks.0.norm1.mean",
        "blocks.0.0.bn2.bn.running_var": "blocks.0.norm2.var",
        "blocks.0.0.conv1.weight": "blocks.0.conv1.weight",
        "blocks.1.0.conv1.weight": "blocks.1.conv1.weight",
        "blocks.1.0.conv_sc.bias": "blocks.1.shortcut.bias",
        "blocks.1.1.theta.u0": "blocks.1.theta.u",
        "blocks.1.1.gamma": "blocks.1.gamma",
        "output_layer.0.gain": "norm.weight",
        "output_layer.2.weight": "image.weight",
    },
    ("studiogan", False): {
        "blocks.0.0.conv2d1.weight_orig": "blocks.0.conv1.weight",
        "blocks.0.0.bn1.embed0.weight_v": "blocks.0.norm1.gain.v",
        "blocks.0.0.bn1.bn.num_batches_tracked": "",
        "blocks.1.0.conv2d1.bias": "blocks.1.conv1.bias",
        "blocks.2.0.conv1x1_attn.weight_u": "blocks.1.o.u",
        "blocks.2.0.sigma": "blocks.1.gamma",
        "blocks.3.0.conv2d1.bias": "blocks.2.conv1.bias",
        "bn4.running_mean": "norm.mean",
        "conv2d5.weight_orig": "image.weight",
    },
    ("studiogan", True): {"linear1.weight_orig": "head.linear.weight", "embedding.weight_u": "head.embedding.u"},
    ("biggan-pytorch", True): {"embed.u0": "head.embedding.u", "linear.bias": "head.linear.bias"},
}


@pytest.mark.parametrize("which", NAMES)
def test_names(which):
    library, discriminator = which
    assert translate_names(NAMES[which], LIBRARIES[library], discriminator) == (NAMES[which], [])


# Rejected files -------------------------------------------------------------------------------------

OF = ReferenceConfig("biggan-pytorch", 32, 4, 3, 12, attention=(-1, -1))
STUDIO = ReferenceConfig("studiogan", 32, 4, 3, 12)


class Code:
    def __reduce__(self):
        return print, ("this must not run",)


def narrow(g):
    for name, axis in (("weight", 0), ("bias", 0), ("u0", 1)):
        g[f"blocks.1.0.conv1.{name}"] = g[f"blocks.1.0.conv1.{name}"].narrow(axis, 0, 8)


def unshare(g):
    for block in range(3):
        for bn in ("bn1", "bn2"):
            for part in ("gain", "bias"):
                g[f"blocks.{block}.0.{bn}.{part}.weight"] = g[f"blocks.{block}.0.{bn}.{part}.weight"][:, :5]


BAD = {  # what is done to a generator of BigGAN-PyTorch: what is said
    "bottleneck": (lambda g: g.update({"blocks.0.0.conv3.weight": torch.ones(1)}), "bottleneck blocks"),
    "stylegan": (lambda g: g.update({"mapping.fc0.weight": torch.ones(1)}), "mapping.fc0.weight: a StyleGAN"),
    "unknown": (lambda g: g.update({"extra.weight": torch.ones(1)}), "extra.weight: not of a known generator"),
    "missing": (lambda g: g.pop("blocks.1.0.conv2.bias"), "missing weight blocks.1.conv2.bias"),
    "shapes": (narrow, "widths that our network cannot have"),
    "axes": (lambda g: g.update({"linear.weight": torch.ones(3)}), "shapes that do not fit"),
    "vectors": (lambda g: g.update({"linear.u0": torch.ones(1, 3)}), "shapes that do not fit"),
    "not hierarchical": (unshare, "without a hierarchical latent"),
    "object": (lambda g: g.update({"x": "text"}), "x is not a tensor"),
    "code": (lambda g: g.update({"x": Code()}), "could run code"),
    "half the norms": (lambda g: g.pop("blocks.1.0.conv1.u0"), "conv1.weight has no spectral norm"),
}


@pytest.mark.parametrize("kind", BAD)
def test_unsupported_files_are_rejected_by_name(tmp_path, kind, capsys):
    change, message = BAD[kind]
    g = theirs.make_generator_state(OF)
    change(g)
    torch.save(g, tmp_path / "g.pth")
    with pytest.raises(UsageError, match=message):
        import_weights(tmp_path / "g.pth", "biggan-pytorch", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "must not run" not in capsys.readouterr().out


def test_files_without_state_dicts(tmp_path):
    (tmp_path / "a.pth").write_bytes(b"nothing of the kind")
    (tmp_path / "b.pkl").write_bytes(pickle.dumps({"weight": Code()}))
    path = tmp_path / "c.pth"
    for content, problem in (([torch.ones(1)], "it holds no named tensors"), ({"step": 3}, "step is not a tensor")):
        torch.save(content, path)
        with advises(f"{path}: not a state dict: {problem}. Use a file of torch.save(model.state_dict(), ...)"):
            import_weights(path, "studiogan", tmp_path / "out")
    torch.save(torch.nn.Linear(2, 3).state_dict(), path)
    assert read_tensors(path).keys() == {"weight", "bias"}
    for name, message in (
        ("a.pth", "a.pth"),
        ("b.pkl", "could run code"),
        ("d.pth", "not exist"),
    ):
        with pytest.raises(UsageError, match=message):
            import_weights(tmp_path / name, "studiogan", tmp_path / "out")


@pytest.mark.parametrize("code", [b"\x80\x02\x86.", b"\x80\x02)Q.", b"\x80\x02K\x01K\x02s."])
def test_a_damaged_pickle_is_one_line(tmp_path, code):
    """Torch's reader of it raises IndexError, AttributeError and what else."""
    torch.save({"weight": torch.ones(1)}, tmp_path / "whole.pth")
    with zipfile.ZipFile(tmp_path / "whole.pth") as source, zipfile.ZipFile(tmp_path / "a.pth", "w") as damaged:
        for name in source.namelist():
            damaged.writestr(name, code if name.endswith("data.pkl") else source.read(name))
    with pytest.raises(UsageError, match="cannot be read as a state dict"):
        import_weights(tmp_path / "a.pth", "studiogan", tmp_path / "out")


def test_attention_at_different_resolutions_is_rejected(tmp_path):
    write_files(tmp_path, dataclasses.replace(STUDIO, width=8, attention=(1, 1)))
    d = tmp_path / "d.pth"
    with advises(f"{d}: attention at 16 px in G and 8 px in D; ours is at the same resolution in both. Import G alone"):
        import_weights(tmp_path / "g.pth", "studiogan", tmp_path / "out", d)
    assert import_weights(tmp_path / "g.pth", "studiogan", tmp_path / "out").config["net"]["attention"] == 16


def test_attention_at_two_resolutions_is_rejected(tmp_path):
    of = dataclasses.replace(OF, attention=(1, -1))
    g = theirs.make_generator_state(of)
    g |= {name.replace("blocks.1.1", "blocks.0.1"): value for name, value in g.items() if name.startswith("blocks.1.1")}
    torch.save(g, tmp_path / "g.pth")
    with pytest.raises(UsageError, match="attention at 8 and 16 px in G, but ours is at one resolution"):
        import_weights(tmp_path / "g.pth", "biggan-pytorch", tmp_path / "out")


def test_a_generator_whose_discriminator_does_not_fit_is_imported_alone(tmp_path):
    g, d = tmp_path / "g.pth", tmp_path / "d.pth"
    write_files(tmp_path, dataclasses.replace(KINDS["studiogan-sagan"][0], head="W/O"))
    with advises(f"{d}: unconditional, but the generator is conditional. Import G alone"):
        import_weights(g, "studiogan", tmp_path / "out", d)
    write_files(tmp_path, dataclasses.replace(KINDS["studiogan-sagan"][0], head="2C"))
    with advises(f"{d}: embeddings of 6 numbers, not 8. Import G alone"):
        import_weights(g, "studiogan", tmp_path / "out", d)
    assert import_weights(g, "studiogan", tmp_path / "out").spec.classes == 7


def test_a_wrong_family_or_library_is_rejected(tmp_path):
    g, _ = write_files(tmp_path, STUDIO)
    path = tmp_path / "g.pth"
    with advises(f"--nets sngan: does not fit {path}, which has one class embedding for all norms. Leave --nets out"):
        import_weights(path, "studiogan", tmp_path / "out", family="sngan")
    assert import_weights(path, "studiogan", tmp_path / "advised").config["net"]["name"] == "biggan"
    with pytest.raises(UsageError, match="not of a known generator of BigGAN-PyTorch"):
        import_weights(tmp_path / "g.pth", "biggan-pytorch", tmp_path / "out")
    with pytest.raises(UsageError, match="2 names, but the generator has 3 classes"):
        import_weights(tmp_path / "g.pth", "studiogan", tmp_path / "out", classes=["a", "b"])
    safetensors.torch.save_file(g, tmp_path / "g.safetensors")
    assert (
        import_weights(tmp_path / "g.safetensors", "studiogan", tmp_path / "out", classes=["a", "b", "c"]).classes[2]
        == "c"
    )


def test_batch_norm_in_d_is_rejected(tmp_path):
    write_files(tmp_path, STUDIO)
    d = {"blocks.1.0.bn1.weight": torch.ones(8), "blocks.1.0.conv2d1.weight": torch.ones(8, 8, 3, 3)}
    torch.save(d, tmp_path / "d.pth")
    with advises("d.pth: batch norm in the discriminator is not supported. Import the generator alone"):
        import_weights(tmp_path / "g.pth", "studiogan", tmp_path / "out", tmp_path / "d.pth")
    assert import_weights(tmp_path / "g.pth", "studiogan", tmp_path / "out").spec.classes == 3


def test_a_generator_with_attention_is_of_the_family_advised(tmp_path):
    write_files(tmp_path, KINDS["studiogan-sagan"][0])
    path = tmp_path / "g.pth"
    with advises(f"--nets sngan: has no attention, but {path} has. Use --nets sagan"):
        import_weights(path, "studiogan", tmp_path / "out", family="sngan")
    assert import_weights(path, "studiogan", tmp_path / "out", family="sagan").config["net"]["name"] == "sagan"


def test_accumulated_statistics_are_sums_over_batches(tmp_path):
    g = theirs.make_generator_state(OF)
    plain = import_state(tmp_path, g, "plain")
    for name in [name for name in g if "stored" in name]:
        layer, _, which = name.rpartition(".")
        g[f"{layer}.bn.{which}"] = g.pop(name) * 4
        g[f"{layer}.bn.accumulation_counter"] = torch.tensor([4.0])
    summed = import_state(tmp_path, g, "summed")
    np.testing.assert_array_equal(plain.sample(4), summed.sample(4))


def import_state(folder, g, name):
    torch.save(g, folder / f"{name}.pth")
    return import_weights(folder / f"{name}.pth", "biggan-pytorch", folder / name)


@pytest.mark.slow
def test_an_imported_model_works_like_any_other(tmp_path):
    """Sampled, exported, and trained on."""
    write_files(tmp_path, dataclasses.replace(STUDIO, classes=10))
    line = ["import", tmp_path / "g.pth", "--from", "studiogan", "--discriminator", tmp_path / "d.pth"]
    output = run_cli(*line, "--out", tmp_path / "model")
    assert output.status == 0, output
    assert "biggan, 32 px, 10 classes" in output.out
    assert run_cli("sample", tmp_path / "model", "--labels=3,7", "--count=4", "--out", tmp_path / "a.png").status == 0
    assert run_cli("export", tmp_path / "model", "--out", tmp_path / "export").status == 0
    assert "--data" in usage_error("eval", tmp_path / "model")
    np.savez(tmp_path / "data.npz", images=paragan.load(tmp_path / "model").sample(20), labels=np.arange(20) % 10)
    score = run_cli("eval", tmp_path / "model", "--data", tmp_path / "data.npz", "--metrics=prdc", "--count=16")
    assert "precision_pixels" in score.out, score
    net = paragan.load(tmp_path / "model").config["net"]
    (tmp_path / "run.yaml").write_text(
        to_yaml({"data": {"path": "digits", "resolution": 32, "channels": 3}, "nets": net, "batch": 4, "lanes": 2})
    )
    train = ["train", tmp_path / "run.yaml", "--init-from", tmp_path / "model", "--kimg=0.004", "--run-dir"]
    quick = ["--evaluation.metrics=[]", "--output.tick_kimg=0.004", "--device.precision=float32"]
    ended = run_cli(*train, tmp_path / "run", *quick)
    assert ended.status == 0, ended
    assert "with files in it" in usage_error(*line, "--out", tmp_path / "model")
