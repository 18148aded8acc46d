"""Import BigGAN, SNGAN, SAGAN and ContraGAN of BigGAN-PyTorch and StudioGAN.

    import_weights(Path("G_ema.pth"), "biggan-pytorch", Path("folder"), discriminator_file=Path("D.pth"))

Resolution, widths, classes and the place of attention follow from the shapes. Names are translated by layer_names.py;
each of our modules takes the tensors that it needs, and tensors that no module takes are an error. Differences in how
the networks compute are resolved in the weights, so that images are equal up to rounding:

* conditional batch norm takes [class, z] there and [z, class] here: columns are exchanged;
* gains per class are 1 + weight there, and the weight here;
* a different epsilon of batch norm is added to the running variances;
* spectral norm keeps its vectors if our layer has spectral norm, and is applied to the weight if not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.schema import from_dict, to_dict
from paragan.models.export_folder import check_new_folder, write_errors_as_usage_errors
from paragan.models.layer_names import LIBRARIES, SourceLibrary, explain_unknown, translate_names
from paragan.models.model import Model, load_model, make_model_config, save_model
from paragan.models.read_weights import read_tensors
from paragan.models.sampler import LabelPrior
from paragan.nets import Nets, Spec
from paragan.nets.attention import SelfAttention
from paragan.nets.lane_batch_norm import ConditionalBatchNorm2d, LaneBatchNorm2d, LinearConditionalBatchNorm2d

Family = Literal["auto", "biggan", "contragan", "sagan", "sngan"]
BATCH_NORM_EPS = LaneBatchNorm2d(1, affine=False).eps


def import_weights(
    generator_file: Path,
    library: str,
    out: Path,
    discriminator_file: Path | None = None,
    family: Family = "auto",
    classes: Sequence[str] = (),
    eps: float | None = None,
) -> Model:
    """Write a model folder with the generator of a file, and the discriminator of another. Returns the model.

    Args:
        library: a key of LIBRARIES.
        out: a new or empty folder.
        family: the networks, if the file leaves it open.
        classes: names of the classes; numbers if empty.
        eps: of the batch norms of the file (default: that of the library).

    Raises:
        UsageError: the file cannot be read, or our networks cannot compute the same.
    """
    check_new_folder(out)
    source = LIBRARIES[library]
    source_g = _SourceNetwork.read(generator_file, source, is_discriminator=False)
    source_d = _SourceNetwork.read(discriminator_file, source, is_discriminator=True) if discriminator_file else None
    with _shape_errors_as_usage_errors(source_g):
        nets, spec = _infer_nets(source_g, source_d, family, source)
    names = _class_names(classes, spec)
    eps_offset = (source.eps if eps is None else eps) - BATCH_NORM_EPS
    g = nets.generator(spec)
    with _shape_errors_as_usage_errors(source_g):
        _load_weights(g, source_g, eps_offset, nets, spec)
    d = None
    if source_d:
        d = nets.discriminator(spec)
        with _shape_errors_as_usage_errors(source_d):
            _load_weights(d, source_d, eps_offset, nets, spec)
    prior = LabelPrior((1 / max(spec.classes, 1),) * spec.classes)
    recipe = f"{source.title}: {generator_file.name}"
    config = make_model_config(nets, spec, prior, names, recipe=recipe, kimg=0.0, batch_norm="running")
    with write_errors_as_usage_errors(out):
        save_model(out, g, d, config)
    return load_model(out)


@contextlib.contextmanager
def _shape_errors_as_usage_errors(source: _SourceNetwork) -> Iterator[None]:
    """Turn errors inside the block into a UsageError: shapes do not fit the names of tensors, or each other."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        message = " ".join(str(error).split())[:200]
        raise UsageError(f"{source.path}: shapes that do not fit each other, or their names: {message}") from error


def _class_names(names: Sequence[str], spec: Spec) -> list[str]:
    if names and len(names) != spec.classes:
        raise UsageError(f"--classes: {len(names)} names, but the generator has {spec.classes} classes")
    return list(names) or [str(label) for label in range(spec.classes)]


@dataclass(frozen=True)
class _SourceNetwork:
    """The tensors of a file under our names."""

    path: Path
    tensors: Mapping[str, Tensor]
    source_names: Mapping[str, str]  # our name -> the name in the file
    used_names: set[str] = field(default_factory=set[str])

    @staticmethod
    def read(path: Path, library: SourceLibrary, is_discriminator: bool) -> _SourceNetwork:
        tensors = read_tensors(path)
        translated, unknown = translate_names(tensors, library, is_discriminator)
        _check_unknown_names(path, library, is_discriminator, translated, unknown)
        source_names = {name: source_name for source_name, name in translated.items() if name}
        renamed = {name: tensors[source_name] for name, source_name in source_names.items()}
        return _SourceNetwork(path, _rename_head(renamed) if is_discriminator else renamed, source_names)

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor. UsageError if it is missing."""
        if name not in self.tensors:
            present = ", ".join(list(self.source_names.values())[:3])
            raise UsageError(f"{self.path}: missing weight {name} (our name): not a complete network ({present}, ...)")
        return list(self.tensors[name].shape)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def use(self, name: str) -> Tensor:
        """Return a tensor and mark it as used. UsageError if it is missing."""
        if name not in self.tensors:
            raise UsageError(f"{self.path}: missing weight {name} (our name), which our network needs")
        self.used_names.add(name)
        return self.tensors[name]

    def use_optional(self, name: str) -> Tensor | None:
        return self.use(name) if self.has(name) else None

    def check_all_used(self) -> None:
        """Raise UsageError if our network did not use all tensors."""
        unused = [self.source_names.get(name, name) for name in self.tensors if name not in self.used_names]
        if unused:
            raise UsageError(f"{self.path}: our network has no use for {', '.join(sorted(unused)[:3])}")

    @property
    def num_blocks(self) -> int:
        return len({name.split(".")[1] for name in self.tensors if name.endswith("conv1.weight")})

    @property
    def attention_blocks(self) -> list[int]:
        """The indices of blocks that attention follows."""
        return sorted(int(name.split(".")[1]) for name in self.tensors if name.endswith(".gamma"))

    @property
    def has_spectral_norm(self) -> bool:
        """Whether its convolutions have spectral norm."""
        return any(name.endswith("conv1.u") for name in self.tensors)


def _check_unknown_names(
    path: Path, library: SourceLibrary, is_discriminator: bool, translated: Mapping[str, str], unknown: Sequence[str]
) -> None:
    target_names = set(translated.values())
    if is_discriminator and any(".norm1." in name for name in target_names):
        raise UsageError(f"{path}: batch norm in the discriminator is not supported. Import the generator alone")
    if not unknown:
        return
    role, other = ("discriminator", "generator") if is_discriminator else ("generator", "discriminator")
    reason = explain_unknown(unknown) or f"not of a known {role} of {library.title} (or is it a {other}?)"
    raise UsageError(f"{path}: cannot be imported: {', '.join(sorted(unknown)[:3])}: {reason}")


def _rename_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name StudioGAN's second linear layer of D: with a bias it is a contrastive embedding, without a classifier."""
    is_contrastive = "head.second.bias" in tensors
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_contrastive:
            name = name.replace("head.embedding.", "head.proxies.").replace("head.second.", "head.embedding.")
        renamed[name.replace("head.second.", "head.classes.")] = tensor
    return renamed


# Inferring the networks ---------------------------------------------------------------------------------


def _infer_nets(
    g: _SourceNetwork, d: _SourceNetwork | None, requested_family: Family, library: SourceLibrary
) -> tuple[Any, Spec]:
    """Return the configuration of our networks with the same shapes, and the shape of the images."""
    resolution = 4 << g.num_blocks
    has_shared_embedding = g.has("conditions.shared.weight")
    family = _infer_family(g, d, requested_family, has_shared_embedding)
    classes = _infer_classes(g, has_shared_embedding)
    spec = Spec(resolution, g.shape("image.weight")[0], classes)
    last_width = g.shape(f"blocks.{g.num_blocks - 1}.conv2.weight")[0]
    width = last_width // 4 if resolution == 32 and family != "sngan" else last_width
    latent_chunk = g.shape("start.weight")[1]  # of a hierarchical latent; otherwise all of it
    networks = [d] if family == "sngan" else [g, d]  # SNGAN's G has no spectral norm
    fields: dict[str, Any] = {
        "name": family,
        "width": width,
        "shortcut": library.shortcut,
        "latent": latent_chunk * (g.num_blocks + 1) if has_shared_embedding else latent_chunk,
        "spectral": all(network.has_spectral_norm for network in networks if network),
    }
    if has_shared_embedding:
        fields["shared"] = _infer_embedding_length(g, latent_chunk)
    if family != "sngan":
        fields["attention"] = _infer_attention_resolution(g, d, resolution)
    if d:
        fields |= _infer_discriminator_fields(d, family, spec)
    nets: Any = from_dict(Nets, fields)  # pyright: ignore
    nets.check(spec)
    return nets, spec


def _infer_family(
    g: _SourceNetwork, d: _SourceNetwork | None, requested_family: Family, has_shared_embedding: bool
) -> str:
    is_contrastive = d is not None and d.has("head.proxies.weight")
    if requested_family == "auto":
        if has_shared_embedding:
            return "contragan" if is_contrastive else "biggan"
        return "sagan" if g.attention_blocks or g.has_spectral_norm else "sngan"
    if has_shared_embedding != (requested_family in ("biggan", "contragan")):
        kind = (
            "one class embedding for all norms" if has_shared_embedding else "a class embedding in each norm, or none"
        )
        raise UsageError(f"--nets {requested_family}: does not fit {g.path}, which has {kind}. Leave --nets out")
    if requested_family == "sngan" and g.attention_blocks:
        raise UsageError(f"--nets sngan: has no attention, but {g.path} has. Use --nets sagan")
    return requested_family


def _infer_classes(g: _SourceNetwork, has_shared_embedding: bool) -> int:
    if has_shared_embedding:
        return g.shape("conditions.shared.weight")[0]
    return g.shape("blocks.0.norm1.gain.weight")[0] if g.has("blocks.0.norm1.gain.weight") else 0


def _infer_embedding_length(g: _SourceNetwork, latent_chunk: int) -> int:
    """Return the length of the shared class embedding. Every norm has to take it together with a chunk of z."""
    length = g.shape("conditions.shared.weight")[1]
    norm_inputs = g.shape("blocks.0.norm1.gain.weight")[1]
    if norm_inputs != length + latent_chunk:
        raise UsageError(
            f"{g.path}: norms take {norm_inputs} inputs, not {length} of the class and {latent_chunk} of z: a shared "
            "embedding without a hierarchical latent is not supported"
        )
    return length


def _infer_attention_resolution(g: _SourceNetwork, d: _SourceNetwork | None, resolution: int) -> int:
    """Return the resolution of attention, which our two networks share; 0 without attention."""
    in_g = [8 << block for block in g.attention_blocks]
    places = f"at {' and '.join(map(str, in_g)) or 'no'} px in G"
    if len(in_g) > 1:
        raise UsageError(f"{g.path}: attention {places}, but ours is at one resolution: cannot be imported")
    if d:
        in_d = [max(resolution >> block + 1, 8 if resolution == 32 else 4) for block in d.attention_blocks]
        if in_d != in_g:
            places += f" and {' and '.join(map(str, in_d)) or 'no'} px in D"
            raise UsageError(f"{d.path}: attention {places}; ours is at the same resolution in both. Import G alone")
    return in_g[0] if in_g else 0


def _infer_discriminator_fields(d: _SourceNetwork, family: str, spec: Spec) -> dict[str, Any]:
    first_width = d.shape("blocks.0.conv2.weight")[0]
    last_width = d.shape(f"blocks.{d.num_blocks - 1}.conv2.weight")[0]
    if family != "sngan":
        width = last_width // (2 if spec.resolution == 32 else 16)  # factors of our D's last block
    elif spec.resolution == 32:
        width = last_width
    else:
        width = first_width
    fields: dict[str, Any] = {"d_width": max(width, 1)}
    conditioning = "projection"
    if d.has("head.embedding.bias"):
        conditioning = "contrastive"
    elif d.has("head.classes.weight"):
        conditioning = "classifier"
    if spec.classes and conditioning == "projection" and not d.has("head.embedding.weight"):
        raise UsageError(f"{d.path}: unconditional, but the generator is conditional. Import G alone")
    fields["d_conditioning"] = conditioning if spec.classes else "auto"
    if conditioning == "contrastive":
        length = d.shape("head.embedding.weight")[0]
        if family == "contragan":
            fields["embedding"] = length
        elif length != min(last_width, 512):
            raise UsageError(f"{d.path}: embeddings of {length} numbers, not {min(last_width, 512)}. Import G alone")
    if family == "sngan":
        inner, outer = d.shape("blocks.1.conv1.weight")[:2]
        fields["block_width"] = "in" if outer == inner != d.shape("blocks.1.conv2.weight")[0] else "out"
    return fields


# Weights ----------------------------------------------------------------------------------------------


def _load_weights(net: nn.Module, source: _SourceNetwork, eps_offset: float, nets: Any, spec: Spec) -> None:
    """Load the weights of a file into our network. UsageError names the first that do not fit."""
    state = dict(net.state_dict())
    for path, module in net.named_modules():
        prefix = path.replace(".block.", ".").replace(".attention", "")
        state |= {f"{path}.{name}": value for name, value in _module_state(prefix, module, source, eps_offset).items()}
    net_state = net.state_dict()
    for name, value in state.items():
        if value.shape != net_state[name].shape:
            raise UsageError(
                f"{source.path}: {nets.name} at {spec.resolution} px has {list(net_state[name].shape)} in {name}, the "
                f"file {list(value.shape)}: widths that our network cannot have ({to_dict(nets)})"
            )
    source.check_all_used()
    net.load_state_dict(state)


def _module_state(prefix: str, module: nn.Module, source: _SourceNetwork, eps_offset: float) -> dict[str, Tensor]:
    """Return the state of one of our modules, by the names of its own state dict."""
    if isinstance(module, SelfAttention):
        return {"gamma": source.use(f"{prefix}.gamma").reshape(1)}
    if isinstance(module, LaneBatchNorm2d):
        state = _running_statistics(source, prefix, eps_offset)
        if module.affine:
            state |= {"weight": source.use(f"{prefix}.weight"), "bias": source.use(f"{prefix}.bias")}
        return state
    if isinstance(module, ConditionalBatchNorm2d):
        gain, bias = (_effective_weight(_read_layer(source, f"{prefix}.{part}")) for part in ("gain", "bias"))
        return {"gain.weight": 1 + gain, "bias.weight": bias}
    if isinstance(module, LinearConditionalBatchNorm2d):
        return {}  # its layers are modules of their own
    if isinstance(module, nn.Conv2d | nn.Linear | nn.Embedding):
        return _layer_state(prefix, module, source)
    return {}


def _running_statistics(source: _SourceNetwork, prefix: str, eps_offset: float) -> dict[str, Tensor]:
    """Return the running moments. Standing statistics of BigGAN-PyTorch are sums over batches."""
    prefix = prefix.removesuffix(".norm")
    mean = source.use(f"{prefix}.mean")
    var = source.use(f"{prefix}.var")
    summed = source.use_optional(f"{prefix}.summed")
    batches = 1 if summed is None else summed.clamp(min=1)
    return {"running_mean": mean / batches, "running_var": var / batches + eps_offset}


@dataclass(frozen=True)
class _LayerWeight:
    """A weight, with the vectors of its spectral norm if it has one: u^T weight v is its largest singular value."""

    weight: Tensor
    u: Tensor | None = None
    v: Tensor | None = None


def _read_layer(source: _SourceNetwork, prefix: str) -> _LayerWeight:
    """Read a weight. BigGAN-PyTorch stores u alone; every pass computes v from it, and then u again."""
    weight = source.use(f"{prefix}.weight")
    u = source.use_optional(f"{prefix}.u")
    v = source.use_optional(f"{prefix}.v")
    if u is None:
        return _LayerWeight(weight)
    matrix = weight.flatten(1)
    u = u.flatten()
    if v is None:
        v = F.normalize(matrix.T @ u, dim=0)
        u = F.normalize(matrix @ v, dim=0)
    return _LayerWeight(weight, u, v)


def _effective_weight(layer: _LayerWeight) -> Tensor:
    """Return the weight divided by its spectral norm."""
    if layer.u is None or layer.v is None:
        return layer.weight
    return layer.weight / (layer.u @ (layer.weight.flatten(1) @ layer.v))


def _layer_state(prefix: str, module: nn.Module, source: _SourceNetwork) -> dict[str, Tensor]:
    if prefix.endswith((".gain", ".bias")) and isinstance(module, nn.Embedding):
        return {}  # part of its norm
    layer = _read_layer(source, prefix)
    if prefix.endswith((".norm1.gain", ".norm2.gain", ".norm1.bias", ".norm2.bias")):
        layer = _move_class_columns_last(layer, source.shape("conditions.shared.weight")[1])
    bias = {"bias": source.use(f"{prefix}.bias")} if getattr(module, "bias", None) is not None else {}
    if not hasattr(module, "parametrizations"):
        return {"weight": _effective_weight(layer)} | bias
    if layer.u is None or layer.v is None:
        name = source.source_names.get(f"{prefix}.weight", prefix)
        raise UsageError(f"{source.path}: {name} has no spectral norm, but other layers have")
    norm = "parametrizations.weight"
    return {f"{norm}.original": layer.weight, f"{norm}.0._u": layer.u, f"{norm}.0._v": layer.v} | bias


def _move_class_columns_last(layer: _LayerWeight, embedding_length: int) -> _LayerWeight:
    """Reorder columns from [class, z] to [z, class]."""
    v = None if layer.v is None else layer.v.roll(-embedding_length)
    return _LayerWeight(layer.weight.roll(-embedding_length, 1), layer.u, v)
