"""Translate the names of weights of BigGAN-PyTorch and StudioGAN to ours.

A name has four parts from left to right: the place (a residual block, an attention, an end of the network), the layer,
the part of a batch norm, and the tensor. Our names are those of our modules without wrappers:

    blocks.1.0.bn1.gain.u0 (BigGAN-PyTorch), blocks.1.0.bn1.gain.weight_u (StudioGAN) -> blocks.1.norm1.gain.u
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Shortcut = Literal["input", "activated"]


@dataclass(frozen=True)
class SourceLibrary:
    """The names that a library uses, each mapped to ours.

    block_layers : layers of a residual block or an attention, as in `blocks.0.0.conv1`
    g_layers     : all other layers of G
    d_layers     : all other layers of D
    norm_parts   : parts of a batch norm; "" for the norm itself
    tensor_names : tensors of a layer; "" for those that are not needed
    eps          : of its batch norms
    shortcut     : input of the shortcuts of D's blocks (field `nets.shortcut`)
    """

    title: str
    block_layers: Mapping[str, str]
    g_layers: Mapping[str, str]
    d_layers: Mapping[str, str]
    norm_parts: Mapping[str, str]
    tensor_names: Mapping[str, str]
    eps: float
    shortcut: Shortcut


BIGGAN_PYTORCH = SourceLibrary(
    title="BigGAN-PyTorch",
    block_layers={
        "conv1": "conv1",
        "conv2": "conv2",
        "conv_sc": "shortcut",
        "bn1": "norm1",
        "bn2": "norm2",
        "theta": "theta",
        "phi": "phi",
        "g": "g",
        "o": "o",
        "gamma": "gamma",
    },
    g_layers={
        "shared": "conditions.shared",
        "linear": "start",
        "output_layer.0": "norm",
        "output_layer.2": "image",
    },
    d_layers={"linear": "head.linear", "embed": "head.embedding"},
    norm_parts={"gain": "gain", "bias": "bias", "bn": ""},
    tensor_names={
        "weight": "weight",
        "bias": "bias",
        "gain": "weight",  # of the last batch norm
        "u0": "u",
        "stored_mean": "mean",  # with its own batch norm
        "stored_var": "var",
        "running_mean": "mean",  # with its batch norm across devices
        "running_var": "var",
        "accumulation_counter": "summed",  # number of batches in the sums of standing statistics
        "num_batches_tracked": "",
        **dict.fromkeys([*(f"sv{i}" for i in range(8)), *(f"u{i}" for i in range(1, 8))], ""),  # used for logging only
    },
    eps=1e-5,
    shortcut="input",
)

STUDIOGAN = SourceLibrary(
    title="StudioGAN",
    block_layers={
        "conv2d1": "conv1",
        "conv2d2": "conv2",
        "conv2d0": "shortcut",
        "bn1": "norm1",
        "bn2": "norm2",
        "conv1x1_theta": "theta",
        "conv1x1_phi": "phi",
        "conv1x1_g": "g",
        "conv1x1_attn": "o",
        "sigma": "gamma",
    },
    g_layers={"shared": "conditions.shared", "linear0": "start", "bn4": "norm", "conv2d5": "image"},
    d_layers={"linear1": "head.linear", "linear2": "head.second", "embedding": "head.embedding"},
    norm_parts={"gain": "gain", "bias": "bias", "embed0": "gain", "embed1": "bias", "bn": ""},
    tensor_names={
        "weight": "weight",
        "bias": "bias",
        "weight_orig": "weight",
        "weight_u": "u",
        "weight_v": "v",
        "running_mean": "mean",
        "running_var": "var",
        "num_batches_tracked": "",
    },
    eps=1e-4,
    shortcut="activated",
)

LIBRARIES = {"biggan-pytorch": BIGGAN_PYTORCH, "studiogan": STUDIOGAN}

# Names of layers of other networks, and what they indicate.
UNSUPPORTED_PATTERNS = {
    r"\.conv_sc2?$|\.conv2d3\.|\.conv3\.|\.conv4\.": "bottleneck blocks, as in BigGAN-deep",
    r"^(mapping|synthesis)\.": "a StyleGAN",
    r"^deconv|^conv[0-9]\.": "a DCGAN",
    r"^(linear_mi|linear3|linear4|info_|cls_|real_|fake_)": "a discriminator with an unsupported head",
}


def translate_names(
    names: Iterable[str], library: SourceLibrary, is_discriminator: bool
) -> tuple[dict[str, str], list[str]]:
    """Translate names of a state dict.

    Returns:
        their name -> our name, "" if the tensor is not needed; and the names that are not in the tables.
    """
    names = list(names)
    block_prefixes = _block_prefixes(names, library)
    end_layers = library.d_layers if is_discriminator else library.g_layers
    translated: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        our_name = _translate_name(name, block_prefixes, library, end_layers)
        if our_name is None:
            unknown.append(name)
        else:
            translated[name] = our_name
    return translated, unknown


def _block_prefixes(names: list[str], library: SourceLibrary) -> dict[str, str]:
    """Map `blocks.i.j` of the library to our `blocks.k`. An attention belongs to the residual block before it."""
    layers_of: dict[tuple[int, int], set[str]] = {}
    for name in names:
        if match := re.match(r"blocks\.(\d+)\.(\d+)\.(\w+)", name):
            layers_of.setdefault((int(match[1]), int(match[2])), set()).add(library.block_layers.get(match[3], ""))
    prefixes: dict[str, str] = {}
    num_blocks = 0
    for (i, j), layers in sorted(layers_of.items()):
        if "conv1" in layers:
            num_blocks += 1
        prefixes[f"blocks.{i}.{j}"] = f"blocks.{max(num_blocks - 1, 0)}"
    return prefixes


def _translate_name(
    name: str, block_prefixes: Mapping[str, str], library: SourceLibrary, end_layers: Mapping[str, str]
) -> str | None:
    """Return our name, "" if the tensor is not needed, None if the name is unknown."""
    block = ".".join(name.split(".")[:3])
    if block in block_prefixes:
        layer, *rest = name[len(block) + 1 :].split(".")
        if layer not in library.block_layers:
            return None
        our_layer = f"{block_prefixes[block]}.{library.block_layers[layer]}"
        if not rest:
            return our_layer  # a scalar: the weight of attention
    else:
        layer = next((layer for layer in end_layers if name.startswith(f"{layer}.")), None)
        if layer is None:
            return None
        our_layer = end_layers[layer]
        rest = name[len(layer) + 1 :].split(".")
    *parts, tensor = rest
    if len(parts) > 1 or tensor not in library.tensor_names or any(part not in library.norm_parts for part in parts):
        return None
    if not library.tensor_names[tensor]:
        return ""
    our_parts = [library.norm_parts[part] for part in parts]
    return ".".join(filter(None, [our_layer, *our_parts, library.tensor_names[tensor]]))


def explain_unknown(unknown: Iterable[str]) -> str:
    """Return what unknown names indicate, "" if nothing."""
    for name in unknown:
        for pattern, explanation in UNSUPPORTED_PATTERNS.items():
            if re.search(pattern, name):
                return explanation
    return ""
