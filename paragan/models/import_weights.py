"""Models of other libraries as models of ours: BigGAN, SNGAN, SAGAN and ContraGAN of BigGAN-PyTorch and StudioGAN.

    bring(Path("G_ema.pth"), "biggan-pytorch", Path("folder"), d=Path("D.pth"))

Resolution, widths, classes and the place of attention are read off the shapes. What differs in how it is computed is
settled in the weights, so that images are equal up to rounding:

* conditional batch norm sees [class, z] there and [z, class] here: columns change places;
* gains per class are 1 + weight there, and the weight itself here;
* other epsilons of batch norm are added to the running variances;
* spectral norm keeps its vectors where our layer has it too, and is divided out where ours is plain.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
    """Write a model folder with their generator, and their discriminator where it is given; what it then is.

    family  : where the file leaves it open
    classes : their names; numbers if not given
    eps     : of their batch norms, where it is not the library's default
    """
    check_new_folder(out)
    source = LIBRARIES[library]
    theirs = [
        _SourceNetwork.read(path, source, path is discriminator_file)
        for path in (generator_file, discriminator_file)
        if path
    ]
    with _check_shapes(theirs[0]):
        nets, spec = _infer_nets(theirs[0], theirs[1] if discriminator_file else None, family, source)
    names = _class_names(classes, spec)
    made = [nets.generator(spec), *([nets.discriminator(spec)] if discriminator_file else [])]
    offset = (source.eps if eps is None else eps) - BATCH_NORM_EPS
    for net, weights in zip(made, theirs):
        with _check_shapes(weights):
            _load_weights(net, weights, offset, nets, spec)
    about = {"recipe": f"{source.title}: {generator_file.name}", "kimg": 0.0, "batch_norm": "running"}
    config = make_model_config(nets, spec, LabelPrior((1 / max(spec.classes, 1),) * spec.classes), names, **about)
    with write_errors_as_usage_errors(out):
        save_model(out, made[0], made[1] if discriminator_file else None, config)
    return load_model(out)


@contextlib.contextmanager
def _check_shapes(source: _SourceNetwork) -> Iterator[None]:
    """Unusable where tensors have other numbers of axes than their names say, or do not fit each other."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"{source.path}: shapes that do not fit each other, or their names: {said}") from error


def _class_names(names: Sequence[str], spec: Spec) -> list[str]:
    if names and len(names) != spec.classes:
        raise UsageError(f"--classes has {len(names)} names, and the generator {spec.classes} classes")
    return list(names) or [str(label) for label in range(spec.classes)]


@dataclass(frozen=True)
class _SourceNetwork:
    """A network of theirs: tensors under our names, and what they are called there."""

    path: Path
    tensors: Mapping[str, Tensor]
    source_names: Mapping[str, str]
    used_names: set[str] = field(default_factory=set[str])

    @staticmethod
    def read(path: Path, library: SourceLibrary, is_discriminator: bool) -> _SourceNetwork:
        tensors = read_tensors(path)
        found, unknown = translate_names(tensors, library, is_discriminator)
        _check_unknown_names(path, library, is_discriminator, found, unknown)
        called = {ours: name for name, ours in found.items() if ours}
        of_ours = {ours: tensors[name] for ours, name in called.items()}
        return _SourceNetwork(path, _rename_head(of_ours) if is_discriminator else of_ours, called)

    def shape(self, name: str) -> list[int]:
        """Of a weight. Unusable where it is missing."""
        if name not in self.tensors:
            has = ", ".join(list(self.source_names.values())[:3])
            raise UsageError(
                f"{self.path} has no {name}, in our words: it is no whole network of this library (it has {has}...)"
            )
        return list(self.tensors[name].shape)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def use(self, name: str) -> Tensor:
        """A tensor that our network needs. Unusable where there is none."""
        if name not in self.tensors:
            raise UsageError(f"{self.path} has no {name}, in our words, which our network needs")
        self.used_names.add(name)
        return self.tensors[name]

    def use_optional(self, name: str) -> Tensor | None:
        return self.use(name) if self.has(name) else None

    def check_all_used(self) -> None:
        """Unusable where tensors were left over."""
        left = [self.source_names.get(name, name) for name in self.tensors if name not in self.used_names]
        if left:
            raise UsageError(f"{self.path}: our network has no place for {', '.join(sorted(left)[:3])}")

    @property
    def num_blocks(self) -> int:
        return len({name.split(".")[1] for name in self.tensors if name.endswith("conv1.weight")})

    @property
    def attention_blocks(self) -> list[int]:
        """The blocks that attention follows."""
        return sorted(int(name.split(".")[1]) for name in self.tensors if name.endswith(".gamma"))

    @property
    def has_spectral_norm(self) -> bool:
        """Whether its convolutions are spectrally normalised."""
        return any(name.endswith("conv1.u") for name in self.tensors)


def _check_unknown_names(
    path: Path, library: SourceLibrary, is_discriminator: bool, translated: Mapping[str, str], unknown: Sequence[str]
) -> None:
    ours = set(translated.values())
    if is_discriminator and any(".norm1." in name for name in ours):
        raise UsageError(
            f"{path}: batch norm in the discriminator is not among our networks; import the generator alone"
        )
    if not unknown:
        return
    role, other = ("discriminator", "generator") if is_discriminator else ("generator", "discriminator")
    why = explain_unknown(unknown) or f"not of a {role} of {library.title} that we know (or is it a {other}?)"
    raise UsageError(f"{path} cannot be imported: {', '.join(sorted(unknown)[:3])}: {why}")


def _rename_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """StudioGAN's second linear layer is a classifier (no bias), or says where an image is beside its class."""
    contrastive, renamed = "head.second.bias" in tensors, {}
    for name, tensor in tensors.items():
        if contrastive:
            name = name.replace("head.embedding.", "head.proxies.").replace("head.second.", "head.embedding.")
        renamed[name.replace("head.second.", "head.classes.")] = tensor
    return renamed


# What networks these are ------------------------------------------------------------------------------


def _infer_nets(
    g: _SourceNetwork, d: _SourceNetwork | None, requested_family: Family, library: SourceLibrary
) -> tuple[Any, Spec]:
    """Our record of the same networks, and the images they are for."""
    size = 4 << g.num_blocks
    shared = g.has("conditions.shared.weight")
    family = _infer_family(g, d, requested_family, shared)
    classes = _infer_classes(g, shared)
    spec = Spec(size, g.shape("image.weight")[0], classes)
    last = g.shape(f"blocks.{g.num_blocks - 1}.conv2.weight")[0]
    narrow = size == 32 and family != "sngan"
    chunk = g.shape("start.weight")[1]
    fields: dict[str, Any] = {"name": family, "width": last // 4 if narrow else last, "shortcut": library.shortcut}
    fields["latent"] = chunk * (g.num_blocks + 1) if shared else chunk
    fields["spectral"] = all(one.has_spectral_norm for one in (g, d) if one and not (family == "sngan" and one is g))
    if shared:
        fields["shared"] = _infer_embedding_length(g, chunk)
    if family != "sngan":
        fields["attention"] = _infer_attention_resolution(g, d, size)
    if d:
        fields |= _infer_discriminator_fields(d, family, size, spec)
    nets: Any = from_dict(Nets, fields)  # pyright: ignore
    nets.check(spec)
    return nets, spec


def _infer_family(g: _SourceNetwork, d: _SourceNetwork | None, requested_family: Family, shared: bool) -> str:
    contrastive = d is not None and d.has("head.proxies.weight")
    if requested_family == "auto":
        if shared:
            return "contragan" if contrastive else "biggan"
        return "sagan" if g.attention_blocks or g.has_spectral_norm else "sngan"
    if shared != (requested_family in ("biggan", "contragan")):
        what = "embeds classes once for all norms" if shared else "has an embedding of the class in each norm, or none"
        raise UsageError(f"--nets {requested_family} does not fit {g.path}, which {what}: leave --nets out")
    if requested_family == "sngan" and g.attention_blocks:
        raise UsageError(f"--nets sngan has no attention, and {g.path} has: --nets sagan")
    return requested_family


def _infer_classes(g: _SourceNetwork, shared: bool) -> int:
    if shared:
        return g.shape("conditions.shared.weight")[0]
    return g.shape("blocks.0.norm1.gain.weight")[0] if g.has("blocks.0.norm1.gain.weight") else 0


def _infer_embedding_length(g: _SourceNetwork, chunk: int) -> int:
    """The length of the embedding; every norm has to see it beside a part of z."""
    length = g.shape("conditions.shared.weight")[1]
    seen = g.shape("blocks.0.norm1.gain.weight")[1]
    if seen != length + chunk:
        raise UsageError(
            f"{g.path}: norms see {seen} numbers, not a class of {length} beside {chunk} of z: a shared embedding "
            "without a hierarchical latent is not among our networks"
        )
    return length


def _infer_attention_resolution(g: _SourceNetwork, d: _SourceNetwork | None, size: int) -> int:
    """Its resolution, which is the same in both networks of ours; 0: none."""
    places = [[8 << block for block in g.attention_blocks]]
    if d:
        places.append([max(size >> block + 1, 8 if size == 32 else 4) for block in d.attention_blocks])
    if any(len(of_one) > 1 for of_one in places) or any(of_one != places[0] for of_one in places):
        told_g, *told_d = (" and ".join(map(str, of_one)) or "no" for of_one in places)
        where = f"at {told_g} px in G" + "".join(f" and {one} px in D" for one in told_d)
        raise UsageError(f"{g.path}: attention {where}; ours is at one resolution, the same in both: import G alone")
    return places[0][0] if places[0] else 0


def _infer_discriminator_fields(d: _SourceNetwork, family: str, size: int, spec: Spec) -> dict[str, Any]:
    first, last = d.shape("blocks.0.conv2.weight")[0], d.shape(f"blocks.{d.num_blocks - 1}.conv2.weight")[0]
    width = (
        last if family == "sngan" and size == 32 else first if family == "sngan" else last // _d_width_multiple(size)
    )
    fields: dict[str, Any] = {"d_width": max(width, 1)}
    judged = {"head.embedding.bias": "contrastive", "head.classes.weight": "classifier"}
    kind = next((kind for name, kind in judged.items() if d.has(name)), "projection")
    if spec.classes and kind == "projection" and not d.has("head.embedding.weight"):
        raise UsageError(f"{d.path} is not told the class, and the generator is: ours would be; import G alone")
    fields["d_conditioning"] = kind if spec.classes else "auto"
    if kind == "contrastive":
        length = d.shape("head.embedding.weight")[0]
        if family == "contragan":
            fields["embedding"] = length
        elif length != min(last, 512):
            raise UsageError(f"{d.path}: points of {length} numbers; ours has {min(last, 512)} there: import G alone")
    if family == "sngan":
        before, inside = d.shape("blocks.1.conv1.weight")[1::-1]
        fields["block_width"] = "in" if before == inside != d.shape("blocks.1.conv2.weight")[0] else "out"
    return fields


def _d_width_multiple(size: int) -> int:
    """D's last block is so many times as wide as `d_width`."""
    return 2 if size == 32 else 16


# Weights ----------------------------------------------------------------------------------------------


def _load_weights(net: nn.Module, source: _SourceNetwork, eps_offset: float, nets: Any, spec: Spec) -> None:
    """Give our network their weights. Unusable names the first that do not fit."""
    state = dict(net.state_dict())
    for path, module in net.named_modules():
        given = _module_state(path.replace(".block.", ".").replace(".attention", ""), module, source, eps_offset)
        state |= {f"{path}.{name}": value for name, value in given.items()}
    own = net.state_dict()
    for name, value in state.items():
        if value.shape != own[name].shape:
            raise UsageError(
                f"{source.path}: {nets.name} at {spec.resolution} px has {list(own[name].shape)} in {name}, and the "
                f"file {list(value.shape)}: widths of another form, which ours does not have ({to_dict(nets)})"
            )
    source.check_all_used()
    net.load_state_dict(state)


def _module_state(prefix: str, module: nn.Module, source: _SourceNetwork, eps_offset: float) -> dict[str, Tensor]:
    """What one module of ours gets, by the names of its own state dict."""
    if isinstance(module, SelfAttention):
        return {"gamma": source.use(f"{prefix}.gamma").reshape(1)}
    if isinstance(module, LaneBatchNorm2d):
        given = _running_statistics(source, prefix, eps_offset)
        return given | ({k: source.use(f"{prefix}.{k}") for k in ("weight", "bias")} if module.affine else {})
    if isinstance(module, ConditionalBatchNorm2d):
        gain, bias = (_effective_weight(_read_layer(source, f"{prefix}.{part}")) for part in ("gain", "bias"))
        return {"gain.weight": 1 + gain, "bias.weight": bias}
    if isinstance(module, LinearConditionalBatchNorm2d):
        return {}  # its layers come by themselves
    if isinstance(module, nn.Conv2d | nn.Linear | nn.Embedding):
        return _layer_state(prefix, module, source)
    return {}


def _running_statistics(source: _SourceNetwork, prefix: str, eps_offset: float) -> dict[str, Tensor]:
    """Running moments; BigGAN-PyTorch's standing ones are sums over batches."""
    prefix = prefix.removesuffix(".norm")
    mean, var = source.use(f"{prefix}.mean"), source.use(f"{prefix}.var")
    summed = source.use_optional(f"{prefix}.summed")
    batches = 1 if summed is None else summed.clamp(min=1)
    return {"running_mean": mean / batches, "running_var": var / batches + eps_offset}


@dataclass(frozen=True)
class _LayerWeight:
    """A weight, and the vectors of its spectral norm where it has one: u^T weight v is its largest singular value."""

    weight: Tensor
    u: Tensor | None = None
    v: Tensor | None = None


def _read_layer(source: _SourceNetwork, prefix: str) -> _LayerWeight:
    """BigGAN-PyTorch keeps u alone, and makes v of it in every pass, and then u anew."""
    weight, u, v = (
        source.use(f"{prefix}.weight"),
        source.use_optional(f"{prefix}.u"),
        source.use_optional(f"{prefix}.v"),
    )
    if u is None:
        return _LayerWeight(weight)
    matrix, u = weight.flatten(1), u.flatten()
    if v is None:
        v = F.normalize(matrix.T @ u, dim=0)
        u = F.normalize(matrix @ v, dim=0)
    return _LayerWeight(weight, u, v)


def _effective_weight(layer: _LayerWeight) -> Tensor:
    """The weight that the network multiplies by."""
    if layer.u is None or layer.v is None:
        return layer.weight
    return layer.weight / (layer.u @ (layer.weight.flatten(1) @ layer.v))


def _layer_state(prefix: str, module: nn.Module, source: _SourceNetwork) -> dict[str, Tensor]:
    if prefix.endswith((".gain", ".bias")) and isinstance(module, nn.Embedding):
        return {}  # came with its norm
    layer = _read_layer(source, prefix)
    if prefix.endswith((".norm1.gain", ".norm2.gain", ".norm1.bias", ".norm2.bias")):
        layer = _move_class_columns_last(layer, source.shape("conditions.shared.weight")[1])
    bias = {"bias": source.use(f"{prefix}.bias")} if getattr(module, "bias", None) is not None else {}
    if not hasattr(module, "parametrizations"):
        return {"weight": _effective_weight(layer)} | bias
    if layer.u is None or layer.v is None:
        raise UsageError(
            f"{source.path}: {source.source_names.get(f'{prefix}.weight', prefix)} has no spectral norm, and others there have"
        )
    norm = "parametrizations.weight"
    return {f"{norm}.original": layer.weight, f"{norm}.0._u": layer.u, f"{norm}.0._v": layer.v} | bias


def _move_class_columns_last(layer: _LayerWeight, embedding_length: int) -> _LayerWeight:
    """Columns for [class, z] as columns for [z, class]."""
    turned = dataclasses.replace(layer, weight=layer.weight.roll(-embedding_length, 1))
    return turned if layer.v is None else dataclasses.replace(turned, v=layer.v.roll(-embedding_length))
