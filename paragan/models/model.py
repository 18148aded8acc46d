"""A model: the averaged generator as safetensors and JSON, or one such model for each label.

    model/config.json, model.safetensors, discriminator.safetensors
    model/config.json, 0000/, 0001/, ...       per label: the common configuration, and a folder with a model each

The generator is the average (EMA) of the trained one, with batch-norm statistics of its own (bn_recalibration.py). A
per-label model loads its generators when they are needed and keeps at most 1 GB of them. Loading runs no code from the
files; networks of the user have to be passed again.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from paragan.config.user_code import conditioning_input_of
from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.core.rng import CPU
from paragan.core.schema import from_dict, to_dict
from paragan.data.dataset import Dataset
from paragan.losses.running_state import strip_objective_state
from paragan.models.autoencoder import encoding_from_config, load_decoder
from paragan.models.load_generator import build_generator, resolve_nets, wrap_config_errors
from paragan.models.model_config import FORMAT_VERSION, read_model_config
from paragan.models.model_files import MODEL_PARTS, PER_LABEL, find_model_dir, is_per_label, read_consistent
from paragan.models.per_label_layout import label_dir
from paragan.models.sampler import DataSource, LabelPrior, LatentSource, PerLabelSampler, Sampler, to_float32, to_uint8
from paragan.nets import Spec


@dataclass(frozen=True, repr=False)
class Model:
    """A loaded generator and its configuration.

    images = model.sample(16, labels=[3, "cat"], truncation=0.7)      # uint8 [16, H, W, C]

    sampler : makes images by index, uint8 [n, C, H, W]
    spec    : shape and number of classes of the images
    config  : the content of config.json
    folder  : the model folder
    """

    sampler: Sampler | PerLabelSampler
    spec: Spec
    config: dict[str, Any]
    folder: Path

    def __repr__(self) -> str:
        classes = f", {len(self.classes)} classes" if self.classes else ""
        shape = "x".join(map(str, self.spec.sample_spec.shape))
        return f"Model({shape}{classes}, {self.kimg:g} kimg, from {self.folder})"

    @property
    def is_per_label(self) -> bool:
        """Whether there is a generator for each label."""
        return isinstance(self.sampler, PerLabelSampler)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; () for an unconditional model."""
        return tuple(self.config["classes"])

    @property
    def kimg(self) -> float:
        """Length of training, in thousands of real images shown to D."""
        return float(self.config["kimg"])

    @property
    def batch_norm(self) -> str | None:
        """The source of its batch-norm statistics: standing, running or none; None if not recorded."""
        return str(self.config["batch_norm"]) if "batch_norm" in self.config else None

    @property
    def g(self) -> nn.Module:
        """The generator: (z [N, latent], y int64 [N] or None) -> images [N, C, H, W] in [-1, 1], or latents of such.

        Raises:
            UsageError: the model has a generator for each label.
        """
        if isinstance(self.sampler, PerLabelSampler):
            raise UsageError("model.g: this model has a generator for each label. Use model.sampler.for_label(0).g")
        return self.sampler.g

    def to(self, device: str | torch.device) -> Model:
        """Move the network to a device and return the model on it."""
        return dataclasses.replace(self, sampler=self.sampler.to(torch.device(device)))

    def labels(
        self, count: int, labels: Sequence[int | str] | np.ndarray | None = None, seed: int = 0
    ) -> np.ndarray | None:
        """Return labels for `count` samples, int64 [count]; None without classes.

        Args:
            labels: used in turn: class indices (int, also those that this method returns) or class names (str). None
                draws labels as often as in the data.

        Raises:
            UsageError: there is no such class, or a str could be a name and another class's index.
        """
        if labels is None:
            return self.sampler.labels(range(count), seed)
        if not self.classes:
            raise UsageError("labels: this model was trained without classes. Leave labels out")
        if not len(labels):
            raise UsageError("labels=[]: none are given. Use labels=None to draw them as often as in the data")
        numbers = [parse_label(label, self.classes) for label in labels]
        return np.array(numbers, np.int64)[np.arange(count) % len(numbers)]

    def sample(
        self, count: int, labels: Sequence[int | str] | None = None, truncation: float = 1.0, seed: int = 0
    ) -> np.ndarray:
        """Return samples, uint8 [count, H, W, C]; of a model of numbers float32 [count, ...].

        Sample i depends only on (seed, i) and its label. `model.labels(count, labels, seed)` returns the labels.

        Args:
            labels: as in `labels`.
            truncation: below 1, latents beyond 2 * truncation standard deviations are drawn again.
        """
        if count < 1:
            raise UsageError(f"count={count}: it must be 1 or more")
        if not 0 <= seed < 2**63:
            raise UsageError(f"seed={seed}: it must be 0 to 2^63 - 1")
        samples = self.sampler.images(range(count), self.labels(count, labels, seed), seed, truncation).numpy()
        return samples if self.spec.array_shape else samples.transpose(0, 2, 3, 1)


# Writing ------------------------------------------------------------------------------------------------


def save_model(folder: Path, g: nn.Module, d: nn.Module | None, config: dict[str, Any]) -> None:
    """Write model.safetensors, discriminator.safetensors (unless d is None) and config.json, each atomically.

    config.json comes last and holds the checksums of the weights that belong to it (see model_files.py).
    """
    folder.mkdir(parents=True, exist_ok=True)
    checksums: dict[str, int] = {}
    for name, net in (("model", g), ("discriminator", d)):
        if net is None:
            continue
        data = safetensors.torch.save(_without_shared_storage(strip_objective_state(net.state_dict())))
        atomic_write_bytes(folder / f"{name}.safetensors", data)
        checksums[name] = zlib.crc32(data)
    _write_config(folder, config | {"crc32": checksums})


def _without_shared_storage(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that several layers share, which safetensors does not store."""
    known_pointers: set[int] = set()
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        tensor = value.detach().cpu().contiguous()
        result[name] = tensor.clone() if tensor.data_ptr() in known_pointers else tensor
        known_pointers.add(tensor.data_ptr())
    return result


def remove_model(folder: Path) -> None:
    """Remove the files of `save_model`, config.json first."""
    for name in ("config.json", *(f"{name}.safetensors" for name in MODEL_PARTS)):
        (folder / name).unlink(missing_ok=True)


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    atomic_write_bytes(folder / "config.json", json.dumps({"format": FORMAT_VERSION, **config}, indent=1).encode())


def init_per_label_model(folder: Path, spec: Spec, prior: LabelPrior, classes: Sequence[str], **extra: Any) -> None:
    """Create the folder of a per-label model, without generators yet."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"kind": PER_LABEL, "spec": to_dict(spec), "prior": list(prior.probabilities), "classes": list(classes)}
    _write_config(folder, config | extra)


def install_label_model(folder: Path, label: int, source: Path) -> None:
    """Copy the model in the folder `source` into a per-label model, as the generator of a label."""
    target = label_dir(folder, label)
    target.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "config.json"):
        atomic_write_bytes(target / name, (source / name).read_bytes())


def labels_without_generator(path: Path, model: Model) -> list[str]:
    """Return the labels of a per-label model that are not trained yet, as `3 (cat)`."""
    folder = find_model_dir(path)
    return [
        f"{label} ({name})"
        for label, name in enumerate(model.classes)
        if not (label_dir(folder, label) / "model.safetensors").exists()
    ]


def weights_bytes(path: Path) -> int:
    """Return the size on disk of the weights of a generator, or of all generators of a per-label model."""
    return sum(file.stat().st_size for file in find_model_dir(path).rglob("model.safetensors"))


def make_model_config(net: Any, spec: Spec, prior: LabelPrior, classes: Sequence[str], **extra: Any) -> dict[str, Any]:
    """Return the content of config.json: enough to build the network again and to sample from it."""
    config = {"net": to_dict(net), "spec": to_dict(spec), "prior": list(prior.probabilities), "classes": list(classes)}
    return config | extra


# Loading ------------------------------------------------------------------------------------------------


def load_model(
    path: str | Path,
    device: torch.device = CPU,
    nets: Any = None,
    dataset: Dataset | None = None,
    decoder: str = "",
) -> Model:
    """Load a model from a run folder, a model folder or a model.safetensors. Runs no code from the files.

    Args:
        nets: the user-defined networks that it was trained with: the object, or `module:Class`.
        dataset: input data of the generator, if it takes data.
        decoder: the autoencoder that decodes its latents, a folder or `module:Class`; "" for the one that is recorded.

    Raises:
        UsageError: there is no model, or its files cannot be used.
    """
    folder = find_model_dir(Path(path))
    snapshot = None if is_per_label(folder) else read_consistent(folder, ["model"])
    config = snapshot.config if snapshot else read_model_config(folder)
    with wrap_config_errors(folder):
        spec = from_dict(Spec, config["spec"])
        prior = LabelPrior(tuple(float(probability) for probability in config["prior"]))
        if len(prior.probabilities) != spec.classes or not all(0 <= p <= 1 for p in prior.probabilities):
            raise ValueError("prior does not fit the classes")
        if not all(isinstance(name, str) for name in config["classes"]):
            raise ValueError("classes are not names")
        if len(config["classes"]) != spec.classes:
            raise ValueError(f"there are {len(config['classes'])} classes, and spec has {spec.classes}")
    if snapshot is None:
        config |= _aggregate_label_configs(folder, len(prior.probabilities))
        per_label_sampler = PerLabelSampler(
            lambda label: _load_label_sampler(folder, spec, config, label, device, nets, dataset, decoder),
            prior,
            device,
        )
        return Model(per_label_sampler, spec, config, folder)
    net_config = resolve_nets(config.get("net"), nets, folder)
    g = build_generator(snapshot, net_config, spec).to(device)
    sampler = make_sampler(g, net_config, spec, prior, device, dataset)
    if encoding := encoding_from_config(config, decoder, folder):
        sampler = dataclasses.replace(sampler, to_output=load_decoder(encoding).to_pixels)
    return Model(sampler, spec, config, folder)


def make_sampler(
    g: nn.Module, nets: Any, spec: Spec, prior: LabelPrior, device: torch.device, dataset: Dataset | None = None
) -> Sampler:
    """Return a sampler of a generator that `nets` built.

    Raises:
        UsageError: the generator takes data as input, and there is no dataset.
    """
    conditioning_input = conditioning_input_of(nets)
    if conditioning_input is None:
        source = LatentSource(nets.latent)
    elif dataset is not None:
        _check_input_data(dataset, spec)
        source = DataSource(dataset, conditioning_input)
    else:
        raise UsageError(
            f"{nets.name}: its input is data. Use --data PATH (in Python, dataset=paragan.DataOptions(PATH))"
        )
    to_output = to_float32 if spec.array_shape else to_uint8
    return Sampler(g, source, prior, device, to_output=to_output, main_field=spec.main_field or "images")


def _check_input_data(dataset: Dataset, spec: Spec) -> None:
    """Raise UsageError if a generator that takes data was trained on another kind of data; sizes may differ."""
    shape = spec.shape
    has_numbers = bool(spec.array_shape or spec.image_shape)
    same_kind = len(dataset.shape) == len(shape) and dataset.is_array == has_numbers
    if not same_kind or dataset.shape[0] != shape[0]:
        kind = "records" if spec.array_shape else "images [C, H, W]"
        raise UsageError(
            f"--data: holds {list(dataset.shape)}, and the model was trained on {kind} {list(shape)}. Use such data"
        )
    if spec.sample_rate and dataset.sample_rate not in (0, spec.sample_rate):
        raise UsageError(
            f"--data: audio of {dataset.sample_rate} Hz, and the model was trained on {spec.sample_rate} Hz. Use audio "
            f"of {spec.sample_rate} Hz"
        )


def read_spec(path: Path) -> Spec:
    """Return what the networks of a model were built for. UsageError if there is no model, or it cannot be read."""
    folder = find_model_dir(path)
    with wrap_config_errors(folder):
        return from_dict(Spec, read_model_config(folder)["spec"])


def _aggregate_label_configs(folder: Path, num_labels: int) -> dict[str, Any]:
    """Return the total kimg of the models of all labels, and the sources of their batch-norm statistics."""
    kimg = 0.0
    batch_norms: set[str] = set()
    for label in range(num_labels):
        if not (label_dir(folder, label) / "config.json").exists():
            continue  # not trained yet
        config = read_model_config(label_dir(folder, label))
        kimg += float(config.get("kimg", 0))
        batch_norms.add(str(config.get("batch_norm", "none")))
    return {"kimg": round(kimg, 6), "batch_norm": ", ".join(sorted(batch_norms)) or "none"}


def _load_label_sampler(
    folder: Path,
    joint_spec: Spec,
    config: dict[str, Any],
    label: int,
    device: torch.device,
    nets: Any,
    dataset: Dataset | None,
    decoder: str,
) -> Sampler:
    label_folder = label_dir(folder, label)
    if not (label_folder / "model.safetensors").exists():
        missing = f"no generator for label {label} ({config['classes'][label]})"
        if (folder.parent / "run.yaml").exists():
            raise UsageError(f"{folder}: {missing} yet. `paragan status` shows its progress")
        raise UsageError(f"{folder}: {missing}: it had no run in the pool. Train one, and `paragan pool` adds it")
    if dataset and dataset.labels is not None:
        dataset = dataset.only_class(label)
    model = load_model(label_folder, device, nets, dataset, decoder)
    if model.spec != dataclasses.replace(joint_spec, classes=0) or not isinstance(model.sampler, Sampler):
        raise UsageError(f"{label_folder}: its images differ from those of the model: {model.spec}, not {joint_spec}")
    return model.sampler


# Finding models and labels ------------------------------------------------------------------------------


def find_init_model_dir(path: Path) -> Path:
    """Return the model folder that --init-from names."""
    for folder in (path, path / "model", path.parent):
        if (folder / "model.safetensors").is_file():
            return folder
    raise UsageError(f"--init-from {path}: no model.safetensors. Use a run folder or its model folder")


def parse_labels(text: str, classes: Sequence[str]) -> list[int]:
    """Parse `3,cat` into label numbers."""
    return [parse_label(word, classes) for word in text.split(",")]


def parse_label(label: int | str, classes: Sequence[str]) -> int:
    """Return the index of a class.

    Args:
        label: an int is the index. A str is the name or, in digits, the index of a class; `name:3` and `index:3` say
            which.

    Raises:
        UsageError: there is no such class, or the str is the name of one class and the index of another.
    """
    if not isinstance(label, str):
        try:
            return _check_index(operator.index(label), str(label), classes)
        except TypeError:
            raise UsageError(f"labels: {label!r} is not a class. Use an index (int) or a name (str)") from None
    kind, colon, word = label.partition(":")
    if label in classes or not colon or kind not in ("name", "index"):
        kind = ""
        word = label
    index = int(word) if word.isascii() and word.isdecimal() and len(word) < 19 else -1
    if kind == "index":
        return _check_index(index, label, classes)
    if word not in classes:
        return _check_index(-1 if kind else index, label, classes)
    named = classes.index(word)
    if not kind and 0 <= index < len(classes) and index != named:
        raise UsageError(
            f"labels={word}: could be the class named {word} (index {named}) or the class of index {word} (named "
            f"{classes[index]}). Use name:{word} or index:{word}"
        )
    return named


def _check_index(index: int, label: str, classes: Sequence[str]) -> int:
    if 0 <= index < len(classes):
        return index
    index_prefix = ""
    name_prefix = ""
    if any(name.isdecimal() and int(name) < len(classes) and int(name) != i for i, name in enumerate(classes)):
        index_prefix = "index:"
        name_prefix = "name:"
    names = ", ".join(f"{name_prefix}{name}" for name in classes[:20])
    raise UsageError(
        f"labels: there is no class {label[:40]!r}. Use {index_prefix}0 to {index_prefix}{len(classes) - 1}, "
        f"or a name: {names}"
    )
