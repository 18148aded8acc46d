"""A run: everything that decides what a training does, as one frozen record; and the game built from it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import nn

from ..comm.flat import bucket_bytes
from ..config import build, by_name, plain, record
from ..data.find import FORMS
from ..data.images import Hold, Images, load
from ..data.pipeline import Feed
from ..data.places import Reach, public
from ..devices import autocast, compiler, kind_named, kind_of, pick_device
from ..errors import Unusable
from ..game.average import Decay
from ..game.game import Game, Given
from ..game.objective import Objective
from ..game.player import Player
from ..game.program import program
from ..game.recorded import Recorder
from ..losses.adversarial import Adversarial, OneCall
from ..losses.distilled import Distilled
from ..losses.kept import attach
from ..nets import DCGAN, Spec
from ..nets.aligned import align
from ..nets.laid import lay
from ..nets.norm import LaneBatchNorm, convert
from ..nets.spectral import normalised, power_iteration, train_mode
from ..optim.optimism import wrapper
from ..optim.optimizers import SGD, Kimg, Side, built
from ..strategies.asynchronous import Async
from ..strategies.auto import Auto, Chosen
from ..strategies.per_label import Labels, Lockstep, Mixing, PerLabel
from ..strategies.sync import Sync
from .fitting import refuse_numbers, refuse_unfit_objective, refuse_untold
from .lags import repeating
from .limits import AnyHealth, Guard, Health
from .own import AnyNets, AnyObjective, OwnObjective, check_nets, clip_of, given_of, is_own
from .ramp import Ramp, rate_of, refuse_ramp, rounded_up, stage, stages
from .teacher import Teacher
from .trial import tried

WEIGHT = 3.0  # of a teacher: what does best on the digits
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Strategy = Annotated[Lockstep | Mixing | Async | Labels | Auto, Field(discriminator="name"), by_name]


@record
class Data:
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
    resolution: Count = 0
    channels: Literal[0, 1, 3] = 0
    labels: bool = True
    mirror: bool = False
    only: Count | None = None
    hold: Hold = "auto"
    bad_share: Annotated[float, Field(ge=0, lt=1)] = 0.01
    reach: Reach = Reach()
    feed: Feed = Feed()

    @property
    def told(self) -> str:
        """The path as it is written and said: an address without its password or signature."""
        return public(self.path)


def _listed(value: Any) -> Any:
    """`fd,kid` is a list too."""
    return tuple(value.split(",")) if isinstance(value, str) else value


@record
class Evaluation:
    """What is scored, on how many fakes, every how many kimg (0: at the end only).

    features  : what a score sees: pixels, inception, resnet20 (a classifier of the data at hand), or module:callable
    inception : the weights of that
    reference : an npz with mu and sigma, which Frechet distances compare with in place of the data
    """

    metrics: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ("fd", "kid", "prdc")
    count: Annotated[int, Field(ge=2)] = 10_000
    every_kimg: Kimg = 0.0
    features: str = "pixels"
    inception: str = ""
    reference: str = ""


@record
class Output:
    """What is written while training. Times in kimg.

    keep : how many checkpoints stay
    best : the score by which the best model is kept in best/ (auto: the first of those that are measured; none: by no
           score), such as fd_pixels
    """

    tick_kimg: Kimg = 4.0
    fakes_kimg: Kimg = 40.0
    checkpoint_kimg: Kimg = 40.0
    keep: Positive = 2
    best: str = "auto"


@record
class Device:
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
                is fastest here (measured: docs/layout.md)
    """

    kind: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "float32", "bf16"] = "auto"
    channels_last: bool | Literal["G", "D"] = True
    compile: bool = False
    threads: Count = 0
    merge: Count = 0
    graph: bool = False
    one_call: Literal["auto"] | bool = "auto"
    pad_channels: Annotated[int, Field(ge=0, le=1024)] = 0
    huge_pages: bool = True
    layout: Literal["rules", "measured"] = "rules"

    def layout_of(self, player: str) -> torch.memory_format:
        """How the maps of G or of D lie in memory."""
        return torch.channels_last if self.channels_last in (True, player) else torch.contiguous_format


@record
class Run:
    """A complete training run. `paragan train run.yaml` repeats it.

    batch : images of a step, over all ranks;  lanes : logical workers that share it
    g_batch : images that G makes in its turn (0: as many as batch)
    ramp  : how the batch grows: KIMG:BATCH,... or [[KIMG, BATCH], ...]; rates follow as g.rule and d.rule say
    kimg  : how long, in thousands of real images shown to D
    teacher : a run per label whose generators G also learns from (see `paragan merge`)
    teacher_weight : of the distance to their images in G's loss (0: only D is listened to)
    chosen : where the strategy was left open (auto): for how many ranks it was chosen
    timeout_s : how long an exchange may take; a rank that died is noticed at once, one that hangs after this
    about : why it is as it is, a line each; for people
    """

    recipe: str = "custom"
    data: Data = Data()
    nets: AnyNets = DCGAN()
    objective: AnyObjective = Adversarial()
    g: Side = Side()
    d: Side = Side()
    d_steps: Positive = 1
    average: Decay = Decay()
    strategy: Strategy = Sync()
    batch: Positive = 64
    g_batch: Count = 0
    ramp: Ramp = ()
    lanes: Positive = 8
    kimg: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 100.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    init_from: str = ""
    teacher: str = ""
    teacher_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = WEIGHT
    evaluation: Evaluation = Evaluation()
    output: Output = Output()
    health: AnyHealth = Health()
    guard: Annotated[Guard, by_name] = Guard()
    device: Device = Device()
    chosen: Chosen = Chosen()
    timeout_s: Annotated[float, Field(ge=1, le=1e7, allow_inf_nan=False)] = 300.0
    about: tuple[str, ...] = ()

    @property
    def images(self) -> int:
        """How long the run is, in whole rounds of images."""
        asked = math.ceil(round(self.kimg * 1000, 6))
        start, batch = stage(self, asked - 1)
        return start + rounded_up(asked - start, batch * self.d_steps)

    @property
    def rounds(self) -> int:
        """How many rounds it has."""
        starts = [*stages(self), (self.images, 0)]
        spans = ((min(b, self.images) - a, batch) for (a, batch), (b, _) in itertools.pairwise(starts))
        return sum(span // (batch * self.d_steps) for span, batch in spans if span > 0)

    def round_at(self, images: int) -> int:
        """Real images of the round that has begun by then, as its batch is there."""
        return stage(self, images)[1] * self.d_steps

    @property
    def per_label(self) -> PerLabel | None:
        """The strategy, where every label has a game of its own."""
        return self.strategy if isinstance(self.strategy, PerLabel) else None

    @property
    def round(self) -> int:
        """Real images of one round; of the first, where the batch grows."""
        return self.batch * self.d_steps

    def check(self, ranks: int = 1) -> None:
        """Refuse what cannot work, before anything is made."""
        for name, batch in (("--batch", self.batch), ("--g_batch", self.g_batch)):
            if batch % self.lanes:
                down = batch - batch % self.lanes or self.lanes
                raise Unusable(
                    f"{name} {batch} does not divide into --lanes {self.lanes}: try {name} {down} or "
                    f"{down + self.lanes}"
                )
        if ranks > self.lanes and not self.per_label:
            raise Unusable(f"{ranks} ranks cannot share --lanes {self.lanes}: start at most {self.lanes} ranks")
        self.strategy.check(ranks)
        if self.device.kind == "mps" and ranks > 1:
            raise Unusable(f"--device.kind=mps is one device, and there are {ranks} ranks: start one, or use cpu")
        if self.device.graph:
            self._refuse_graph(ranks)
        if self.device.layout == "measured":
            self._refuse_measuring()
        if self.guard.acts:
            self._refuse_guard(ranks)
        if self.ramp:
            refuse_ramp(self)
        refuse_unfit_objective(self)
        if self.teacher and self.per_label:
            raise Unusable(
                f"teacher={self.teacher} teaches one generator, and --strategy {self.strategy.name} has many"
            )
        if not self.data.path:
            raise Unusable(f"{self.recipe} needs --data D: {FORMS}, or an address of such")

    def _refuse_guard(self, ranks: int) -> None:
        """Going back is for ranks that are all there."""
        if not self.health.watch:
            raise Unusable("--guard rollback goes by what --health=off does not look at: leave --health out")
        if ranks > 1 and self.strategy.lost_after_s:
            name = self.strategy.name
            raise Unusable(
                f"--guard rollback needs all ranks, and --strategy {name} goes on without some: use "
                "--strategy.lost_after_s=0"
            )

    def _refuse_measuring(self) -> None:
        """What is measured is decided once, for ranks that are all there."""
        if isinstance(self.strategy, Auto):
            raise Unusable(
                "--device.layout=measured and --strategy auto do not decide together: take the fields that `paragan "
                "plan --layout` names, or the strategy that `paragan plan` does"
            )
        if self.per_label or self.strategy.lost_after_s:
            raise Unusable(
                f"--device.layout=measured decides before the first round for all ranks, and with --strategy "
                f"{self.strategy.name} they come and go: take the fields that `paragan plan --layout` names"
            )

    def _refuse_graph(self, ranks: int) -> None:
        """Recorded passes are the same kernels on the same memory every time."""
        lone = isinstance(self.strategy, Sync) and self.strategy.order == "alternately"
        kind = kind_named(self.device.kind)
        lacking = kind == "cpu" and not compiler()
        reasons = {
            "records passes on CUDA and on CPUs": kind not in ("cuda", "cpu"),
            "needs a C++ compiler on a CPU (g++, or what CXX names), and there is none": lacking,
            f"is for one rank: with {ranks} gradients leave under backward": ranks > 1,
            f"needs --strategy sync, D and G alternately, not {self.strategy.name}": not lone,
            "and --device.compile=true are two ways to the same: choose one": self.device.compile,
            "and a teacher, loaded when it is asked for, do not go together": bool(self.teacher),
        }
        for reason, holds in reasons.items():
            if holds:
                raise Unusable(f"--device.graph=true {reason}; leave it false")


def written(run: Run) -> dict[str, Any]:
    """The plain record as files have it, without what is secret in its address."""
    return plain(dataclasses.replace(run, data=dataclasses.replace(run.data, path=run.data.told)))


def on_lanes(run: Run, lanes: int) -> Run:
    """A run of so many lanes of a run, or of more like them: one rank's part of it."""
    fields = {name: getattr(run, name) // run.lanes * lanes for name in ("batch", "g_batch")}
    fields["ramp"] = tuple((kimg, batch // run.lanes * lanes) for kimg, batch in run.ramp)
    return dataclasses.replace(run, lanes=lanes, **fields)


def without_code(record: dict[str, Any]) -> Run:
    """The run of a plain record but for what may be code of the user's own: how ranks agree, networks and objective."""
    return build(Run, {name: part for name, part in record.items() if name not in ("strategy", "nets", "objective")})


def differing(name: str) -> bool:
    """Whether a resumed run may differ in this field: how long, where, and what it writes."""
    may = (
        "kimg",
        "chosen",
        "about",
        "timeout_s",
        "output",
        "health",
        "guard",
        "device.kind",
        "device.threads",
        "device.one_call",
        "device.channels_last",
        "device.pad_channels",
        "device.huge_pages",
        "data.bad_share",
        "data.reach",
        "data.feed",
        "evaluation",
        "strategy.lost_after_s",
        "strategy.split",
        "strategy.minutes",
        "strategy.ranks",
        "strategy.rare",
        "strategy.lease_s",
        "strategy.wait",
    )
    return any(name == field or name.startswith(field + ".") for field in may)


def spec_of(run: Run, images: Images) -> Spec:
    """What the networks of a run are built for."""
    classes = len(images.classes) if run.data.labels else 0
    if images.numbers:
        return Spec(0, 0, classes, images.shape)
    channels, resolution, _ = images.shape
    return Spec(resolution, channels, classes)


def load_images(run: Run) -> Images:
    """The data of a run, in memory."""
    data, alone = run.data, run.data.only is not None
    labels = data.labels or alone
    images = load(
        data.path,
        resolution=data.resolution or None,
        channels=data.channels or None,
        labels=labels,
        hold=data.hold,
        bad_share=data.bad_share,
        reach=data.reach,
    )
    return images if data.only is None else images.of_class(data.only)


def resolve(run: Run, images: Images) -> Run:
    """The record with everything filled in that was left to the data or to the device."""
    spec = spec_of(run, images)
    labelled = run.data.labels and images.labels is not None
    hold = "memory" if images.held else "stream"
    sizes = {"resolution": spec.resolution, "channels": spec.channels}
    data = dataclasses.replace(run.data, labels=labelled, hold=hold, **sizes)
    device = run.device
    if device.precision == "auto":
        fast = kind_of(pick_device(device.kind)).bf16()
        device = dataclasses.replace(device, precision="bf16" if fast else "float32")
    evaluation = run.evaluation
    if images.numbers:
        if run.data.mirror:
            raise Unusable("--mirror flips images, and the data are numbers: leave it out")
        refuse_numbers(run.objective)
        if evaluation.features == "pixels":
            evaluation = dataclasses.replace(evaluation, features="values")
    if device.one_call == "auto":
        ours = not is_own(run.nets, run.objective)  # a D of one's own may couple images
        device = dataclasses.replace(device, one_call=ours and kind_of(pick_device(device.kind)).streams)
    run = settled(dataclasses.replace(run, data=data, device=device, evaluation=evaluation))
    refuse_unfit_objective(run)
    refuse_untold(run.objective, labelled)
    check_nets(run.nets, spec_of(run, images))
    return run


def settled(run: Run) -> Run:
    """The record with everything filled in that follows from its other fields."""
    if isinstance(run.strategy, Auto):  # what follows from it is not known yet
        return run
    if isinstance(run.strategy, Async):
        run = dataclasses.replace(run, strategy=repeating(run.strategy))
    return dataclasses.replace(run, g=learning(run.g, run.strategy), d=learning(run.d, run.strategy))


def learning(side: Side, strategy: Strategy) -> Side:
    """How a player learns under a strategy that has an optimizer or a wrapper of its own."""
    optimizer, optimism = side.optimizer, side.optimism
    if strategy.plain_descent:
        if optimizer.name not in ("adam", "sgd", "rmsprop"):
            raise Unusable(f"optimizer={optimizer.name}: --strategy.exact=true moves by gradient descent; use sgd")
        optimizer = optimizer if optimizer.name == "sgd" and not optimizer.momentum else SGD(lr=optimizer.lr)
        if optimism not in ("auto", "none"):
            raise Unusable(f"optimism={optimism}: --strategy.exact=true is optimistic by itself; use none")
    optimism = strategy.optimism if optimism == "auto" else optimism
    ahead = side.extrapolation
    if optimism == "optimistic":
        ahead = strategy.extrapolation if ahead is None else ahead
    elif ahead in (None, strategy.extrapolation):  # a run's own record has it
        ahead = None
    else:
        raise Unusable(
            f"extrapolation={ahead} is for optimism=optimistic, and it is {optimism}; use extrapolation=null"
        )
    return dataclasses.replace(side, optimizer=optimizer, optimism=optimism, extrapolation=ahead)


@dataclass(frozen=True)
class Pair:
    """Two networks on their device, ready to become players, and the size of the latent G takes, or what of a hand it
    is given instead. own: whether they have to be tried."""

    g: nn.Module
    d: nn.Module
    latent: int
    given: Given | None = None
    own: bool = False


def build_nets(run: Run, spec: Spec, device: torch.device) -> Pair:
    """The two networks, initialised from the run's seed whatever else has drawn random numbers."""
    check_nets(run.nets, spec)
    with torch.random.fork_rng():
        torch.manual_seed(run.seed)
        g, d = run.nets.generator(spec), run.nets.discriminator(spec)
    given, own = given_of(run.nets), is_own(run.nets, run.objective)
    for role, net in (("generator", g), ("discriminator", d)) if own else ():
        if not isinstance(net, nn.Module):
            raise Unusable(f"{run.nets.name}.{role} gives {type(net).__name__}, no nn.Module")
    return placed(run, Pair(g, d, 0 if given else run.nets.latent, given, own), device)


def placed(run: Run, pair: Pair, device: torch.device) -> Pair:
    """The two networks on the device, in the layout the run asks for."""
    for name, net in (("G", pair.g), ("D", pair.d)):
        _refuse_unfilled(net)
        _refuse_unsaved(net)
        if any(tensor.device != device for tensor in (*net.parameters(), *net.buffers())):
            net.to(device=device)
        lay(net, run.device.layout_of(name))
        align(net, run.device.pad_channels)
    return pair


def _refuse_unfilled(net: nn.Module) -> None:
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise Unusable(f"{name} has no shape before its first pass: give its layer its sizes (no nn.Lazy... layer)")
        if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape)):
            raise Unusable(f"numbers of {name} share memory (expand), and none could be filled in: clone it")


def _refuse_unsaved(net: nn.Module) -> None:
    for name, value in net.state_dict().items():
        if not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):
            raise Unusable(
                f"{name} is extra state ({type(value).__name__}), and files hold tensors alone: keep it in a buffer, "
                "without get_extra_state"
            )


def refuse_unfit(run: Run, pair: Pair) -> None:
    """Networks that cannot be trained as the run says; what normalises over the batch is made to see lanes."""
    if pair.given and (run.g_batch or run.batch) != run.batch:
        raise Unusable(f"--g_batch {run.g_batch}: G is given the images of the batch, so leave --g_batch out")
    if pair.given and run.teacher:
        raise Unusable(f"teacher={run.teacher} teaches a G that is given latents, not data")
    shared = {id(p) for p in pair.g.parameters()} & {id(p) for p in pair.d.parameters()}
    if shared:
        raise Unusable(f"G and D share {len(shared)} parameters: each network moves its own, so copy the shared layers")
    refuse_clip(run.objective, normalised(pair.d))
    unconverted = [name for net in (pair.g, pair.d) for name in convert(net)]
    if unconverted and run.device.merge != 1:
        raise Unusable(
            f"{unconverted[0]} normalises over the batch in a way lanes cannot see; use --device.merge=1 (lane by lane)"
        )
    refuse_mixed(run.objective, any(isinstance(layer, LaneBatchNorm) for layer in pair.d.modules()))
    for name, layer in pair.g.named_modules():
        if isinstance(layer, LaneBatchNorm) and layer.running_mean is None:
            raise Unusable(
                f"{name} of G keeps no running statistics, so a sample would depend on those made with it: "
                "set track_running_stats=True"
            )


def refuse_mixed(objective: Any, mixes: bool) -> None:
    """A bound on each image's own slope, where what D says of one depends on the others (Gulrajani et al. 2017, 4).
    mixes: whether D has batch norm."""
    if mixes and isinstance(objective, Adversarial) and objective.gp:
        raise Unusable(
            f"objective.gp={objective.gp:g} is of each image's own slope, and D normalises over the batch: use a D "
            "without batch norm (--nets.batch_norm=false), or objective.gp=0"
        )


def refuse_clip(objective: Any, spectral: bool) -> None:
    """Weights that are clipped where something else bounds D already. spectral: whether D has spectral norm."""
    if not isinstance(objective, Adversarial) or not objective.clip:
        return
    if spectral:
        raise Unusable(
            f"objective.clip={objective.clip:g} bounds weights that spectral norm rescales: use --nets.spectral=false "
            "(a D without it), or objective.clip=0"
        )
    if objective.gp:
        raise Unusable(
            f"objective.clip={objective.clip:g} and objective.gp={objective.gp:g} are two ways to bound the slopes of "
            "D: use objective.gp=0, or objective.clip=0"
        )


def build_player(
    run: Run,
    name: str,
    net: nn.Module,
    side: Side,
    batch: int,
    average: Decay | None = None,
    bound: float | None = None,
) -> Player:
    """A network that moves as the run says."""
    train_mode(net)
    side = learning(side, run.strategy)
    player = Player(
        name,
        net,
        lambda parameters: built(side.optimizer, parameters, wrapper(side.optimism, side.extrapolation)),
        elementwise=side.optimizer.elementwise,
        lane_batch=batch // run.lanes,
        average=average,
        rate=rate_of(run, side),
        iterate=power_iteration,
        bound=bound,
        bucket_bytes=bucket_bytes(run.strategy.wire),
        watched=run.health.watch,
    )
    if run.strategy.wire.lossy and player.flat.params.dtype != torch.float32:
        kind = str(player.flat.params.dtype).removeprefix("torch.")
        raise Unusable(f"{name} has {kind} parameters, which only --strategy.wire=exact carries")
    return player


def teacher_of(run: Run, images: Images, device: torch.device) -> Teacher:
    """The generators that a run learns from. Unusable where it cannot."""
    return Teacher.of(Path(run.teacher), spec_of(run, images), run.nets.latent, images.classes, device, run.nets)


def objective_of(run: Run, images: Images, device: torch.device) -> Objective:
    """What the players of a run want."""
    if not isinstance(run.objective, Adversarial):
        return OwnObjective(run.objective)
    objective = OneCall(run.objective) if run.device.one_call is True else run.objective
    if not run.teacher or not run.teacher_weight:
        return objective
    return Distilled(objective, teacher_of(run, images, device), run.teacher_weight)


def recorder_of(run: Run, device: torch.device) -> Callable[[], Recorder | None]:
    """What plays the passes of a turn. Unusable where an objective of one's own does not tell one kind of step from
    another."""
    if not run.device.graph:
        return lambda: None
    objective = run.objective
    if not isinstance(objective, Adversarial):
        raise Unusable("--device.graph=true records the passes of our own objectives only: leave it out")
    if device.type == "cpu":
        return lambda: Recorder(objective.kind, program, warm=0)  # what is compiled rounds otherwise: a resume goes on
    return lambda: Recorder(objective.kind)


def build_game(run: Run, pair: Pair, images: Images, device: torch.device) -> Game:
    """Players, objective and label source of a run."""
    refuse_unfit(run, pair)
    adversarial = run.objective if isinstance(run.objective, Adversarial) else None
    if adversarial:
        attach(adversarial.kept(run.batch), pair.d)
    if run.device.compile:
        for net in (pair.g,) if run.objective.second_order else (pair.g, pair.d):
            net.compile()

    game = Game(
        g=build_player(run, "G", pair.g, run.g, run.g_batch or run.batch, run.average),
        d=build_player(run, "D", pair.d, run.d, run.batch, bound=clip_of(run.objective) or None),
        objective=objective_of(run, images, device),
        latent=pair.latent,
        labels=images.labels if run.data.labels else None,
        g_lane=(run.g_batch or run.batch) // run.lanes,
        d_lane=run.batch // run.lanes,
        d_steps=run.d_steps,
        autocast=autocast(device, run.device.precision),
        recorder=recorder_of(run, device),
        given=pair.given,
        shape=images.shape,
    )
    if not pair.own:
        return game
    before = _buffers(game)
    game = tried(game, images, run.lanes, run.device.merge != 1, adversarial.conditioning if adversarial else "")
    if game.restless and run.device.graph:
        raise Unusable("--device.graph=true records what a pass draws, and these networks draw by themselves (dropout)")
    moved = next((name for name, buffer in _buffers(game).items() if before.get(name) is not buffer), "")
    if moved and run.device.graph:
        raise Unusable(f"--device.graph=true: a forward pass replaces {moved}; write into it (add_), or leave it false")
    return game


def _buffers(game: Game) -> dict[str, torch.Tensor]:
    return {f"{name} of {p.name}": buffer for p in game.players for name, buffer in p.net.named_buffers()}
