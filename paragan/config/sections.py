"""TODO: docstring of paragan/config/sections.py"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field

from paragan.core.schema import config_class
from paragan.data.dataset import CacheMode
from paragan.data.loader.prefetch import PrefetchOptions
from paragan.data.storage.filesystem import RemoteOptions, redact_url
from paragan.optim.optimizers import Kimg

NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Factor = Annotated[float, Field(gt=1, allow_inf_nan=False)]


def parse_on_off(value: Any) -> Any:
    """`--health=off` is a record too."""
    return {"enabled": value} if isinstance(value, bool | str) else value


@config_class
class HealthOptions:
    """When a run is said to be ill; relative to what it did before, where no number below is
    absolute (step, accuracy, apart, consensus, roughness).

    watch     : whether anybody looks
    ticks     : for how many ticks in a row a sign must be there (not those of NaN, of steps and of replicas)
    step      : a step of a player changes its weights by so much of their norm
    collapse  : the diversity of fakes within labels falls below this part of what it was
    blow_up   : a loss or a gradient is so many times what it was
    vanish    : a gradient is below this part of what it was
    accuracy  : D tells so many reals from fakes (and its gradient has vanished: it has won)
    apart     : replicas are so far from their mean, relative to its norm
    consensus : ranks that have players of their own (gossip) are so far from their mean
    roughness : the data of one label look like noise: 1 where neighbouring pixels have nothing to do with each other
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
    """What is done where a run is ill: nothing (none), or it goes back to the last good checkpoint (rollback), with
    something changed.

    rollbacks : at most so many; then the run fails
    lr_factor : every time, both learning rates are multiplied by this
    reseed    : whether it then sees other images, latents and labels
    """

    name: Literal["none", "rollback"] = "none"
    max_rollbacks: PositiveInt = 3
    lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    reseed: bool = True

    @property
    def is_enabled(self) -> bool:
        return self.name == "rollback"


HealthOrSwitch = Annotated[HealthOptions, BeforeValidator(parse_on_off)]


@config_class
class DataOptions:
    """What to train on.

    path       : `digits`, a file, a folder or an address (docs/data.md lists the formats); "" asks for --data
    resolution : images are cropped to a square and resized to this (0: chosen from the data)
    channels   : 1 grey, 3 RGB (0: chosen from the data)
    labels     : whether G and D are told the class
    mirror     : flip every second image left to right
    only       : the images of this class alone, by its number (null: of all); nobody is told a class then
    hold       : decode all of them into memory, or stream them (auto: what is near and takes at most 2 GiB is held)
    bad_share  : how much of the data may be damaged or gone; others of the same class stand in for it
    reach      : how data behind an address is read
    feed       : how streamed images are read ahead
    """

    path: str = ""
    resolution: NonNegativeInt = 0
    channels: Literal[0, 1, 3] = 0
    labels: bool = True
    mirror: bool = False
    only_class: NonNegativeInt | None = None
    cache: CacheMode = "auto"
    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    remote: RemoteOptions = RemoteOptions()
    prefetch: PrefetchOptions = PrefetchOptions()

    @property
    def redacted_path(self) -> str:
        """The path as it is written and said: an address without its password or signature."""
        return redact_url(self.path)


def _parse_list(value: Any) -> Any:
    """`fd,kid` is a list too."""
    return tuple(value.split(",")) if isinstance(value, str) else value


@config_class
class EvaluationOptions:
    """What is scored, on how many fakes, every how many kimg (0: at the end only).

    features  : what a score sees: pixels, inception, resnet20 (a classifier of the data at hand), or module:callable
    inception : the weights of that
    reference : an npz with mu and sigma, which Frechet distances compare with in place of the data
    """

    metrics: Annotated[tuple[str, ...], BeforeValidator(_parse_list)] = ("fd", "kid", "prdc")
    count: Annotated[int, Field(ge=2)] = 10_000
    every_kimg: Kimg = 0.0
    features: str = "pixels"
    inception: str = ""
    reference: str = ""


@config_class
class OutputOptions:
    """What is written while training. Times in kimg.

    keep : how many checkpoints stay
    best : the score by which the best model is kept in best/ (auto: the first of those that are measured; none: by no
           score), such as fd_pixels
    """

    tick_kimg: Kimg = 4.0
    fakes_kimg: Kimg = 40.0
    checkpoint_kimg: Kimg = 40.0
    max_checkpoints: PositiveInt = 2
    best_metric: str = "auto"


@config_class
class DeviceOptions:
    """Where and how the numbers are computed; the results change by rounding only.

    kind      : cpu, cuda, mps (untested), or auto (cuda where there is one, else cpu)
    precision : float32, bf16 (autocast), or auto (bf16 where the device multiplies it in hardware)
    threads   : CPU threads of each rank (0: the cores shared out over the ranks of a host)
    merge     : lanes that share one pass (0: all of a rank's; fewer take less memory)
    channels_last : how maps lie in memory: as [N, H, W, C] in both networks (true), in none, in "G" or in "D" alone
    graph     : record passes and replay them (one rank, sync): as CUDA graphs, or on a CPU as one compiled program
    one_call  : D judges reals and fakes in one pass (auto: on cuda, with networks of ours; on a CPU two are faster)
    pad_channels : fill up the channels of convolutions with zeros to a multiple of this (0: not)
    huge_pages : memory comes in pages of 2 MB where the system (Linux) has them: much less to do for large tensors
    layout    : whether these fields stand as they are (rules), or a few rounds are played before a new run to find what
                is fastest here (measured: docs/tuning.md)
    """

    kind: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "float32", "bf16"] = "auto"
    channels_last: bool | Literal["G", "D"] = True
    compile: bool = False
    threads: NonNegativeInt = 0
    lanes_per_pass: NonNegativeInt = 0
    capture_passes: bool = False
    concat_real_fake: Literal["auto"] | bool = "auto"
    pad_channels: Annotated[int, Field(ge=0, le=1024)] = 0
    huge_pages: bool = True
    tune: Literal["rules", "measured"] = "rules"

    def memory_format_of(self, player: str) -> torch.memory_format:
        """How the maps of G or of D lie in memory."""
        return torch.channels_last if self.channels_last in (True, player) else torch.contiguous_format
