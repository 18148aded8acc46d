"""The model: the averaged generator as safetensors and json; or a folder of such models, one for every label.

model/config.json, model.safetensors, discriminator.safetensors
model/config.json, 0000/, 0001/, ...         per label: what is common to all, and an ordinary model each
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from paragan.config.user_code import conditioning_input_of, load_user_nets
from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.core.rng import CPU
from paragan.core.schema import from_dict, to_dict
from paragan.data.dataset import Dataset
from paragan.losses.running_state import strip_objective_state
from paragan.models.model_files import (
    FORMAT_VERSION,
    MODEL_PARTS,
    read_config_bytes,
    read_consistent,
    read_model_config,
)
from paragan.models.sampler import DataSource, LabelPrior, LatentSource, PerLabelSampler, Sampler, to_float32, to_uint8
from paragan.nets import Nets, Spec

PER_LABEL = "per-label"
SIZE_SLACK_BYTES = 2**24  # bytes


# Files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Model:
    """A generator that was loaded, with what it knows about itself.

    images = model.sample(16, labels=[3, "cat"], truncation=0.7)      # uint8 [16, R, R, C]

    sampler : images by index, uint8 [n, C, R, R]
    folder  : where it was read from
    """

    sampler: Sampler | PerLabelSampler
    spec: Spec
    config: dict[str, Any]
    folder: Path

    def __repr__(self) -> str:
        classes = f", {len(self.classes)} classes" * bool(self.classes)
        shape = "x".join(map(str, self.spec.shape))
        return f"Model({shape}{classes}, {self.kimg:g} kimg, from {self.folder})"

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.config["classes"])

    @property
    def kimg(self) -> float:
        """How long it was trained, in thousands of real images."""
        return float(self.config["kimg"])

    @property
    def batch_norm(self) -> str | None:
        """How its batch norm came by its statistics; None where that is not known."""
        return str(self.config["batch_norm"]) if "batch_norm" in self.config else None

    @property
    def g(self) -> nn.Module:
        """(z [N, latent], y int64 [N] or None) -> images [N, C, R, R] in [-1, 1]. Unusable with one for every label."""
        if isinstance(self.sampler, PerLabelSampler):
            raise UsageError("this model has a generator for every label: model.sampler.of(3).g is that of label 3")
        return self.sampler.g

    def to(self, device: str | torch.device) -> Model:
        """The same on another device; the network itself moves."""
        return dataclasses.replace(self, sampler=self.sampler.to(torch.device(device)))

    def labels(self, count: int, labels: Sequence[int | str] | None = None, seed: int = 0) -> np.ndarray | None:
        """[count] int64 labels of samples: those given, by number or name, in turn; else drawn as often as in the data.
        None without classes."""
        if labels is None:
            return self.sampler.labels(range(count), seed)
        if not self.classes:
            raise UsageError("labels: this model was trained without classes; leave labels out")
        if not labels:
            raise UsageError("labels: none are given; labels=None draws them as often as in the data")
        chosen = [parse_label(str(word), self.classes) for word in labels]
        return np.array(chosen, np.int64)[np.arange(count) % len(chosen)]

    def sample(
        self, count: int, labels: Sequence[int | str] | None = None, truncation: float = 1.0, seed: int = 0
    ) -> np.ndarray:
        """uint8 [count, R, R, C] (of numbers: float32 [count, ...]). Image i depends on (seed, i) and its label alone;
        which labels they have, `model.labels` says of the same arguments."""
        if count < 1 or not 0 <= seed < 2**63:
            raise UsageError(f"count={count} must be 1 or more, and seed={seed} from 0 to 2^63 - 1")
        made = self.sampler.images(range(count), self.labels(count, labels, seed), seed, truncation).numpy()
        return made if self.spec.array_shape else made.transpose(0, 2, 3, 1)


def save_model(folder: Path, g: nn.Module, d: nn.Module | None, config: dict[str, Any]) -> None:
    """Write model.safetensors, discriminator.safetensors (if there is one) and config.json, each aside and renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = dict[str, int]()
    for name, net in (("model", g), ("discriminator", d)):
        if net is None:
            continue
        data = safetensors.torch.save(_without_shared_storage(strip_objective_state(net.state_dict())))
        atomic_write_bytes(folder / f"{name}.safetensors", data)
        sums[name] = zlib.crc32(data)
    _write_config(folder, config | {"crc32": sums})  # last: it tells which weights it is about


def _without_shared_storage(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors want them: one that several layers share is written for each."""
    seen, found = set[int](), dict[str, Tensor]()
    for name, value in state.items():
        tensor = value.detach().cpu().contiguous()
        found[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return found


def remove_model(folder: Path) -> None:
    """Take away what `save_model` wrote."""
    for name in ("config.json", *(f"{name}.safetensors" for name in MODEL_PARTS)):  # the other way round
        (folder / name).unlink(missing_ok=True)


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    atomic_write_bytes(folder / "config.json", json.dumps({"format": FORMAT_VERSION, **config}, indent=1).encode())


def init_per_label_model(folder: Path, spec: Spec, prior: LabelPrior, classes: Sequence[str], **extra: Any) -> None:
    """Make the folder of a model that is to have a generator for every label."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"kind": PER_LABEL, "spec": to_dict(spec), "prior": list(prior.probabilities), "classes": list(classes)}
    _write_config(folder, about | extra)


def label_dir(folder: Path, label: int) -> Path:
    """Where the model of a label is."""
    return folder / f"{label:04d}"


def install_label_model(folder: Path, label: int, source: Path) -> None:
    """Let the generator in the folder `model` be that of a label, from here on."""
    target = label_dir(folder, label)
    target.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "config.json"):
        atomic_write_bytes(target / name, (source / name).read_bytes())


def labels_without_generator(path: Path, model: Model) -> list[str]:
    """The labels of a model per label that are not trained yet, by number and name."""
    folder = find_model_dir(path)
    there = [(label_dir(folder, label) / "model.safetensors").exists() for label in range(len(model.classes))]
    return [f"{label} ({name})" for label, name in enumerate(model.classes) if not there[label]]


def weights_bytes(path: Path) -> int:
    """What the weights of a generator take on disk, or those of all labels."""
    return sum(file.stat().st_size for file in find_model_dir(path).rglob("model.safetensors"))


def make_model_config(net: Any, spec: Spec, prior: LabelPrior, classes: Sequence[str], **extra: Any) -> dict[str, Any]:
    """What config.json says: enough to build the network again and to sample from it."""
    about = {"net": to_dict(net), "spec": to_dict(spec), "prior": list(prior.probabilities), "classes": list(classes)}
    return about | extra


def load_model(path: str | Path, device: torch.device = CPU, nets: Any = None, dataset: Dataset | None = None) -> Model:
    """A generator from a run folder, its model folder, or model.safetensors. Runs no code from the files.

    nets : networks of your own that it was trained with: the object, or `module:Class`
    data : what they are given, where that is data
    """
    folder = find_model_dir(Path(path))
    found = None if is_per_label(folder) else read_consistent(folder, ["model"])
    config = found.config if found else read_model_config(folder)
    with wrap_config_errors(folder):
        spec = from_dict(Spec, config["spec"])
        prior = LabelPrior(tuple(float(share) for share in config["prior"]))
        if len(prior.probabilities) != spec.classes or not all(0 <= share <= 1 for share in prior.probabilities):
            raise ValueError("prior does not fit the classes")
        if not all(isinstance(name, str) for name in config["classes"]):
            raise ValueError("classes are no names")
        if len(config["classes"]) != spec.classes:
            raise ValueError(f"there are {len(config['classes'])} classes, and spec has {spec.classes}")
    if found is None:
        config |= _aggregate_label_configs(folder, len(prior.probabilities))
        parts = PerLabelSampler(
            lambda label: _load_label_sampler(folder, spec, config, label, device, nets, dataset), prior, device
        )
        return Model(parts, spec, config, folder)
    net_config = resolve_nets(config.get("net"), nets, folder)
    with wrap_config_errors(folder), _limit_parameter_bytes(4 * len(found.weights["model"]) + SIZE_SLACK_BYTES):
        g = net_config.generator(spec)
    found.load_into(g)
    return Model(make_sampler(g.to(device).eval(), net_config, spec, prior, device, dataset), spec, config, folder)


@contextlib.contextmanager
def _limit_parameter_bytes(max_bytes: int) -> Iterator[None]:
    """ValueError as soon as a network that this thread makes takes more bytes: a config.json of another size than the
    weights beside it is not to fill the memory before they are compared. (Parametrized weights count twice.)"""
    here, taken = threading.get_ident(), 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal taken
        taken += parameter.nbytes if parameter is not None and threading.get_ident() == here else 0
        if taken > max_bytes:
            raise ValueError("its networks are much larger than the weights beside it")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def wrap_config_errors(folder: Path) -> Iterator[None]:
    """What config.json says is taken at its word here: Unusable names the file where that cannot be."""
    try:
        yield
    except KeyError as error:
        raise UsageError(f"{folder}/config.json has no {error}") from error
    except (UsageError, ValueError, TypeError, RuntimeError) as error:  # the last where there is no memory for it
        raise UsageError(f"{folder}/config.json cannot be used: {error}") from error


def make_sampler(
    g: nn.Module, nets: Any, spec: Spec, prior: LabelPrior, device: torch.device, dataset: Dataset | None = None
) -> Sampler:
    """A sampler of a generator that such networks made. Unusable where it is given data, and there are none."""
    given = conditioning_input_of(nets)
    if given and dataset is None:
        raise UsageError(f"{nets.name} makes its images from data: give them too, --data PATH (in Python, data=...)")
    source = DataSource(dataset, given) if given and dataset else LatentSource(nets.latent)
    return Sampler(g, source, prior, device, to_output=to_float32 if spec.array_shape else to_uint8)


def resolve_nets(config: Any, user_nets: Any, folder: Path) -> Any:
    """The networks a model says it has; those of the user's own are never found by that name, but have to be given."""
    name = config.get("name", "") if isinstance(config, dict) else ""
    if ":" not in str(name):
        with wrap_config_errors(folder):
            return from_dict(Nets, config)  # pyright: ignore
    if user_nets is None:
        raise UsageError(f"{folder} was made by networks of your own, which no file runs: give them, --nets {name}")
    if isinstance(user_nets, str):  # with the fields they were trained with
        return load_user_nets(config | {"name": user_nets})
    return user_nets


def _aggregate_label_configs(folder: Path, num_labels: int) -> dict[str, Any]:
    """What the models of all labels together are: how much they were trained, and their batch norm."""
    kimg, kinds = 0.0, set[str]()
    for label in range(num_labels):
        if not (label_dir(folder, label) / "config.json").exists():
            continue  # not trained yet
        about = read_model_config(label_dir(folder, label))
        kimg += float(about.get("kimg", 0))
        kinds.add(str(about.get("batch_norm", "none")))
    return {"kimg": round(kimg, 6), "batch_norm": ", ".join(sorted(kinds)) or "none"}


def _load_label_sampler(
    folder: Path,
    joint_spec: Spec,
    config: dict[str, Any],
    label: int,
    device: torch.device,
    nets: Any,
    dataset: Dataset | None,
) -> Sampler:
    where, name = label_dir(folder, label), config["classes"][label]
    if not (where / "model.safetensors").exists():
        raise UsageError(
            f"{folder} has no generator for label {label} ({name}) yet: `paragan status` tells how far it is"
        )
    mine = dataset.only_class(label) if dataset and dataset.labels is not None else dataset
    model = load_model(where, device, nets, mine)
    if model.spec != dataclasses.replace(joint_spec, classes=0) or not isinstance(model.sampler, Sampler):
        raise UsageError(f"{where} makes other images than the labels beside it: {model.spec}, not {joint_spec}")
    return model.sampler


def find_model_dir(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UsageError(f"{path} is no safetensors file (pickles are refused: loading one can run code)")
        path = path.parent
    for folder in (path, path / "model"):
        if (folder / "model.safetensors").is_file() or is_per_label(folder):
            return folder
    if not path.exists():
        raise UsageError(f"{path} does not exist; give a run folder, as `paragan train` prints it")
    raise UsageError(
        f"{path} holds no model yet (model/model.safetensors): `paragan train` writes one with each checkpoint"
    )


def is_per_label(folder: Path) -> bool:
    """Whether a folder has a model for every label."""
    try:
        return json.loads(read_config_bytes(folder)).get("kind") == PER_LABEL
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def find_init_model_dir(path: Path) -> Path:
    """The model folder that --init-from names."""
    for folder in (path, path / "model", path.parent):
        if (folder / "model.safetensors").is_file():
            return folder
    raise UsageError(f"--init-from {path}: there is no model.safetensors; give a run folder or its model folder")


def parse_labels(text: str, classes: Sequence[str]) -> list[int]:
    """'3,cat' -> label numbers."""
    return [parse_label(word, classes) for word in text.split(",")]


def parse_label(word: str, classes: Sequence[str]) -> int:
    """'3' or 'cat' -> a label number. A word that is a name is a name, though it were a number too."""
    if word in classes:
        return classes.index(word)
    if word.isdecimal() and len(word) < 19 and int(word) < len(classes):
        return int(word)
    raise UsageError(
        f"labels: there is no class {word[:40]!r}; classes are 0 to {len(classes) - 1}: {', '.join(classes[:20])}"
    )
