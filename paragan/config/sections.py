"""The sections of a run: data, evaluation, output, health, rollback and device.

The class docstrings hold the meaning of every field, and nothing else does."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field

from paragan.core.image_shape import MAX_CHANNELS, Resolution
from paragan.core.schema import config_class
from paragan.data.dataset import CacheMode
from paragan.data.loader.prefetch import PrefetchOptions
from paragan.data.storage.filesystem import RemoteOptions, redact_url
from paragan.data.value_range import AUTO
from paragan.optim.optimizers import Kimg

NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Factor = Annotated[float, Field(gt=1, allow_inf_nan=False)]


def parse_on_off(value: Any) -> Any:
    """Accept `--health=off`."""
    return {"enabled": value} if isinstance(value, bool | str) else value


@config_class
class HealthOptions:
    """When a run counts as unhealthy. Factors are relative to earlier in the run; max_update, d_saturation,
    max_replica_drift, max_consensus_distance and max_roughness are absolute.

    enabled                : whether the health of the run is monitored
    patience_ticks         : how many ticks in a row a sign must be present (NaN, update size and replica drift: one)
    max_update             : a step changes a player's weights by more than this part of their norm
    collapse_factor        : the diversity of fakes within labels is below this part of what it was
    divergence_factor      : a loss or a gradient is so many times what it was
    vanishing_factor       : a gradient is below this part of what it was
    d_saturation           : D classifies so many images correctly, and its gradient has vanished
    max_replica_drift      : replicas are so far from their mean, relative to its norm
    max_consensus_distance : ranks with players of their own (gossip) are so far from their mean
    max_roughness          : the data of one label look like noise (1: neighboring pixels are unrelated)
    """

    enabled: bool = True
    patience_ticks: PositiveInt = 3
    max_update: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    collapse_factor: Fraction = 0.25
    divergence_factor: Factor = 50.0
    vanishing_factor: Fraction = 0.03
    d_saturation: Annotated[float, Field(gt=0.5, le=1)] = 0.99
    max_replica_drift: Fraction = 1e-3
    max_consensus_distance: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    max_roughness: Fraction = 0.85


@config_class
class RollbackOptions:
    """What to do when a run is unhealthy: nothing (none), or continue from the last good checkpoint with other settings
    (rollback).

    max_rollbacks : how often; then the run fails
    lr_factor     : both learning rates are multiplied by this in every rollback
    reseed        : whether the run then uses other images, latents and labels
    """

    name: Literal["none", "rollback"] = "none"
    max_rollbacks: PositiveInt = 3
    lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    reseed: bool = True

    @property
    def is_enabled(self) -> bool:
        return self.name == "rollback"


HealthOrSwitch = Annotated[HealthOptions, BeforeValidator(parse_on_off)]


def _parse_list(value: Any) -> Any:
    """Accept `fd,kid` as a list."""
    return tuple(value.split(",") if value else ()) if isinstance(value, str) else value


@config_class
class DataOptions:
    """What to train on.

    path       : `digits`, a file, a folder or an address (docs/data.md lists the formats); empty: --data is required
    resolution : images are cropped and resized to this: one number for squares, or WIDTHxHEIGHT, such as 256x128 (0: a
                 square chosen from the data)
    channels   : 1 grey, 3 RGB (0: one of these, chosen from the data), 4 RGB and alpha; or all of an .npz, .npy or .h5
    range      : the stored values that become black and white, for images with more than 8 bits: auto (found from the
                 data), full (all 16 bits), or MIN:MAX, which clips values outside and may stretch 8-bit images too
    labels     : whether G and D are conditioned on the class
    label_key  : the key or column that holds the labels, where a data set has several (empty: the usual one)
    mirror     : flip every second image left to right
    only       : train on the images of this class only, by its number (null: all); G and D are then unconditional
    cache      : decode all images into memory, or stream them (auto: local data of at most 2 GiB are kept in memory)
    max_bad_fraction : how much of the data may be damaged or missing; other images of the same class replace it
    max_pixels : of an image; larger files are refused, as they may be made to fill the memory (0: 89,478,485)
    field      : of records of several named arrays (fields), what D judges (empty: image, wave, or the only one)
    segment    : cut a random segment of so many samples from the judged field; shorter records are padded with zeros
                 (0: whole records, of one length)
    aligned    : fields that are cut with it, with the samples for each of their frames: mel:256
    sample_rate : of audio, Hz; files of another rate are refused (0: that of the files)
    resample   : convert audio of another rate
    transform  : module:function that each record passes: (arrays by name, NumPy generator) -> arrays by name
    label_pattern : a regular expression whose group is the class in the name of an audio or array file, such as ^(\\d)_
    decoder    : of latents, the autoencoder that decodes them: a run folder, a model folder or module:Class (empty: the
                 one that encoded them, where it was)
    originals  : of latents, the images that scores compare with (empty: those that were encoded)
    remote     : how data at an address are read
    prefetch   : how streamed images are read ahead
    """

    path: str = ""
    resolution: Resolution = 0
    channels: Annotated[int, Field(ge=0, le=MAX_CHANNELS)] = 0
    range: Annotated[str, BeforeValidator(str)] = AUTO
    labels: bool = True
    label_key: Annotated[str, BeforeValidator(str)] = ""
    mirror: bool = False
    only: NonNegativeInt | None = None
    cache: CacheMode = "auto"
    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    max_pixels: NonNegativeInt = 0
    field: Annotated[str, BeforeValidator(str)] = ""
    segment: NonNegativeInt = 0
    aligned: Annotated[tuple[str, ...], BeforeValidator(_parse_list)] = ()
    sample_rate: NonNegativeInt = 0
    resample: bool = False
    transform: str = ""
    label_pattern: Annotated[str, BeforeValidator(str)] = ""
    decoder: str = ""
    originals: str = ""
    remote: RemoteOptions = RemoteOptions()
    prefetch: PrefetchOptions = PrefetchOptions()

    @property
    def redacted_path(self) -> str:
        """The path as it is written to files and shown: an address without its password or signature."""
        return redact_url(self.path)


@config_class
class InputFingerprints:
    """Fingerprints of the inputs of a run: a resume recognises the same content at another path. Set when a run starts.

    data         : of the images and labels
    init_from    : of the weights it starts from
    distill_from : of the generators that G learns from
    """

    data: str = ""
    init_from: str = ""
    distill_from: str = ""


@config_class
class EvaluationOptions:
    """What is measured of the generator.

    metrics    : the scores: fd, kid, prdc, ... (`paragan eval --help` lists them)
    count      : the number of fakes that are scored
    every_kimg : how often, in kimg (0: at the end only)
    features   : what scores are computed from: pixels, inception, resnet20 (a classifier trained on the data), or
                 module:callable
    inception  : the file of weights for features=inception
    reference  : an npz with mu and sigma, in place of the data in Frechet distances
    """

    metrics: Annotated[tuple[str, ...], BeforeValidator(_parse_list)] = ("fd", "kid", "prdc")
    count: Annotated[int, Field(ge=2)] = 10_000
    every_kimg: Kimg = 0.0
    features: str = "pixels"
    inception: str = ""
    reference: str = ""


@config_class
class OutputOptions:
    """What is written while training.

    tick_kimg       : a line of statistics every so many kimg, and at the end (0: only there)
    fakes_kimg      : a grid of samples every so many kimg, and at the end (0: only there)
    checkpoint_kimg : a checkpoint and a model every so many kimg, and at the end (0: only there)
    max_checkpoints : how many checkpoints are kept
    best_metric     : the score by which the best model is kept in best/, such as fd_pixels (auto: the first that is
                      measured; none: no best model)
    upload_s        : how long the end of a run waits for uploads: of loggers, and if --run-dir is in an object store
    loggers         : where statistics, samples, scores and models go too: tensorboard, wandb, mlflow, trackio, or
                      module:Class (docs/loggers.md); empty: nowhere
    """

    tick_kimg: Kimg = 4.0
    fakes_kimg: Kimg = 40.0
    checkpoint_kimg: Kimg = 40.0
    max_checkpoints: PositiveInt = 2
    best_metric: str = "auto"
    upload_s: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)] = 120.0
    loggers: Annotated[tuple[str | dict[str, object], ...], BeforeValidator(_parse_list)] = ("tensorboard",)


@config_class
class DeviceOptions:
    """Where and how the run is computed. Results differ by rounding only.

    kind             : cpu, cuda (also AMD's GPUs), xpu and mps (untested), or auto (cuda if there is one, else cpu)
    precision        : float32, bf16 (autocast), or auto (bf16 if the device has it in hardware)
    channels_last    : memory format of feature maps: [N, H, W, C] in both networks (true), in neither (false), or only
                       in "G" or "D"
    compile          : compile the networks with torch.compile
    threads          : CPU threads per rank (0: the cores of a host divided among its ranks)
    lanes_per_pass   : how many lanes share one pass (0: all of a rank; fewer need less memory)
    capture_passes   : capture passes and replay them (one rank, sync): as CUDA graphs, or on a CPU as a compiled
                       program
    concat_real_fake : D takes reals and fakes in one pass (auto: on cuda with built-in networks; on a CPU two passes
                       are faster)
    pad_channels     : pad the channels of convolutions with zeros to a multiple of this (0: no padding)
    huge_pages       : use memory pages of 2 MB on Linux, which are faster for large tensors
    deterministic    : use kernels that compute the same bits in every run, where a GPU has faster ones that do not
    tune             : keep these fields as they are (rules), or time some rounds before a new run and use the fastest
                       settings (measured: docs/tuning.md)
    """

    kind: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    precision: Literal["auto", "float32", "bf16"] = "auto"
    channels_last: bool | Literal["G", "D"] = True
    compile: bool = False
    threads: NonNegativeInt = 0
    lanes_per_pass: NonNegativeInt = 0
    capture_passes: bool = False
    concat_real_fake: Literal["auto"] | bool = "auto"
    pad_channels: Annotated[int, Field(ge=0, le=1024)] = 0
    huge_pages: bool = True
    deterministic: bool = False
    tune: Literal["rules", "measured"] = "rules"

    def memory_format_of(self, player: str) -> torch.memory_format:
        """Return the memory format of the feature maps of "G" or "D"."""
        return torch.channels_last if self.channels_last in (True, player) else torch.contiguous_format
