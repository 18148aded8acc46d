"""What other libraries call the layers of BigGAN, SNGAN, SAGAN and ContraGAN, and what we call them.

A name is read from the left: where it is (a residual block, an attention, an end of the network), which layer there,
which part of that layer, and the tensor. `neutral` gives ours for it, as it would be without our wrappers:

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
    """A library whose state dicts are read.

    blocks        : layers of a residual block or an attention, as in `blocks.0.0.conv1`
    g_ends, d_ends: all other layers of the two networks
    parts         : of a batch norm; "" for what is the norm's own
    tensors       : of a layer
    eps           : of its batch norms
    shortcut      : what the shortcuts of D's blocks see (`nets/family.py`)
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
        "stored_mean": "mean",  # its own batch norm
        "stored_var": "var",
        "running_mean": "mean",  # its batch norm across devices
        "running_var": "var",
        "accumulation_counter": "summed",  # how many batches its standing statistics are sums of
        "num_batches_tracked": "",
        **dict.fromkeys([*(f"sv{i}" for i in range(8)), *(f"u{i}" for i in range(1, 8))], ""),  # for its log
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

# Layers of networks that are not among those that are read, and what they tell.
UNSUPPORTED_PATTERNS = {
    r"\.conv_sc2?$|\.conv2d3\.|\.conv3\.|\.conv4\.": "bottleneck blocks, as in BigGAN-deep",
    r"^(mapping|synthesis)\.": "a StyleGAN",
    r"^deconv|^conv[0-9]\.": "a DCGAN",
    r"^(linear_mi|linear3|linear4|info_|cls_|real_|fake_)": "a discriminator with a head that is not among ours",
}


def translate_names(
    names: Iterable[str], library: SourceLibrary, is_discriminator: bool
) -> tuple[dict[str, str], list[str]]:
    """Their names -> ours, "" for what we have no use for; and the names that are not in the table."""
    names = list(names)
    places = _block_prefixes(names, library)
    found, unknown = {}, []
    for name in names:
        ours = _translate_name(name, places, library, library.d_layers if is_discriminator else library.g_layers)
        if ours is None:
            unknown.append(name)
        else:
            found[name] = ours
    return found, unknown


def _block_prefixes(names: list[str], library: SourceLibrary) -> dict[str, str]:
    """Where their block lists are among our residual blocks: an attention belongs to the block before it."""
    inside: dict[tuple[int, int], set[str]] = {}
    for name in names:
        if match := re.match(r"blocks\.(\d+)\.(\d+)\.(\w+)", name):
            inside.setdefault((int(match[1]), int(match[2])), set()).add(library.block_layers.get(match[3], ""))
    places, blocks = {}, 0
    for (i, j), layers in sorted(inside.items()):
        blocks += "conv1" in layers
        places[f"blocks.{i}.{j}"] = f"blocks.{max(blocks - 1, 0)}"
    return places


def _translate_name(
    name: str, block_prefixes: Mapping[str, str], library: SourceLibrary, end_layers: Mapping[str, str]
) -> str | None:
    place = ".".join(name.split(".")[:3])
    if place in block_prefixes:
        layer, *rest = name[len(place) + 1 :].split(".")
        where = library.block_layers.get(layer) and f"{block_prefixes[place]}.{library.block_layers[layer]}"
        if where and not rest:
            return where  # a number of its own: how much attention counts
    else:
        end = next((end for end in end_layers if name.startswith(f"{end}.")), None)
        where, rest = (end_layers[end], name[len(end) + 1 :].split(".")) if end else ("", [])
    *part, tensor = rest or [""]
    if (
        not where
        or len(part) > 1
        or tensor not in library.tensor_names
        or any(p not in library.norm_parts for p in part)
    ):
        return None
    if not library.tensor_names[tensor]:
        return ""
    return ".".join(filter(None, [where, *(library.norm_parts[p] for p in part), library.tensor_names[tensor]]))


def explain_unknown(unknown: Iterable[str]) -> str:
    """What names outside the table tell, "" if nothing."""
    return next(
        (about for name in unknown for pattern, about in UNSUPPORTED_PATTERNS.items() if re.search(pattern, name)), ""
    )
