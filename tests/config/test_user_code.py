"""Networks, objectives and data of the user's own: the examples under every strategy, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paragan as pg
import tiny_run
from advice import Case, advises, case_id
from paragan.cli.main import main
from paragan.comm.world import World
from paragan.config.resolve import make_spec, resolve
from paragan.config.run import Run
from paragan.core.errors import UsageError
from paragan.core.schema import config_class, from_dict
from paragan.models.model import load_model, make_model_config, save_model
from paragan.models.model_files import read_consistent
from paragan.models.sampler import LabelPrior
from paragan.train import checkpoint
from paragan.train.build import build_networks
from paragan.train.loop import play_round
from paragan.train.session import build_session

STRATEGIES = {
    "sync": {"name": "sync"},
    "simultaneous": {"name": "sync", "order": "simultaneous"},
    "quantized": {"name": "quantized"},
    "gossip": {"name": "gossip"},
    "async": {"name": "async"},
    "async, lags": {
        "name": "async",
        "fake_lags": [1, 0, 2],
        "critic_lags": [0, 1],
        "replay_policy": {"name": "replay"},
    },
}
GAMES = {
    "mixture": {"nets": {"name": "examples.mixture:Nets", "width": 8}},
    "showers": {"nets": {"name": "examples.showers:Nets", "width": 2}, "objective": {"r1": 0.1}},
    "tokenizer": {
        "nets": {"name": "examples.tokenizer:Nets", "width": 4},
        "objective": {"name": "examples.tokenizer:Objective"},
    },
}


def data_of(game: str) -> pg.Dataset:
    rng = np.random.default_rng(0)
    if game == "mixture":
        return pg.from_arrays(rng.standard_normal((200, 2)), rng.integers(3, size=200))
    if game == "showers":
        return pg.from_arrays(rng.gamma(1.0, size=(100, 1, 8, 8, 8)), rng.integers(2, size=100))
    return tiny_run.make_dataset()


def run_of(game: str, strategy: dict[str, Any]) -> Run:
    device = {"precision": "float32"}
    common = {"data": {"path": "x"}, "batch": 16, "kimg": 1.0, "device": device, "strategy": strategy}
    return from_dict(Run, common | GAMES[game])


def session(run: Run, data: pg.Dataset, world: World | None = None, start: Any = None):
    world = world or World.solo()
    run = resolve(run, data)
    loaded = start and checkpoint.read_checkpoint(start, world.rank, world.size)
    return build_session(run, world, data, build_networks(run, make_spec(run.data, data), world.device), loaded)


def four_and_two_equal_six(game: str, strategy: dict[str, Any], world: World, folder: Path) -> bool:
    run, data = run_of(game, strategy), data_of(game)
    reference, first = session(run, data, world), session(run, data, world)
    for _ in range(6):
        play_round(reference)
    for _ in range(4):
        play_round(first)
    if first.role.drain:
        first.role.drain()
    clock = {"step": first.clock.step, "images": first.clock.images, "seconds": 0.0}
    saved = checkpoint.Checkpoints(folder, world).save(first.game.players, clock, {}, first.role)
    then = session(run, data, world, saved)
    for _ in range(2):
        play_round(then)
    a, b = tiny_run.gather_owner_state(reference), tiny_run.gather_owner_state(then)
    return tiny_run.is_equal(a, b) and all(bool(t.isfinite().all()) for t in a.values())


@pytest.mark.slow(after=8)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("game", GAMES)
def test_every_game_goes_on_bit_for_bit_under_every_strategy(game, strategy, tmp_path):
    assert four_and_two_equal_six(game, strategy, World.solo(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sync", "quantized", "gossip", "async"])
@pytest.mark.parametrize("game", ["mixture", "tokenizer"])
def test_and_on_two_ranks(pool, game, strategy, tmp_path):
    expected = STRATEGIES[strategy]
    assert all(pool(2, lambda world: four_and_two_equal_six(game, expected, world, tmp_path)))


@pytest.mark.parametrize("game", GAMES)
def test_two_ranks_equal_one(pool, game):
    def played(world):
        s = session(run_of(game, STRATEGIES["sync"]), data_of(game), world)
        for _ in range(4):
            play_round(s)
        return tiny_run.session_state(s)

    two, one = pool(2, played)[0], played(World.solo())
    assert tiny_run.relative_distance(two, one, "G/") < 1e-4
    assert tiny_run.relative_distance(two, one, "D/") < 1e-4


# The command line -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def points(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    rng = np.random.default_rng(0)
    path = folder / "points.npz"
    np.savez(path, x=rng.standard_normal((300, 2)), labels=rng.integers(2, size=300))
    return path


SMALL = ("--nets.width=8", "--batch=16", "--kimg=0.064", "--evaluation.count=40", "--device.threads=1")


def trained(folder: Path, data: Path | str, nets: str, *more: str) -> Path:
    words = ("train", "custom", f"--nets={nets}", f"--data={data}", f"--run-dir={folder}", *SMALL, *more)
    assert main(list(words)) == 0
    return folder


def expect_usage_error(capsys, *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_numbers_from_the_command_line(points, tmp_path, capsys):
    run = trained(tmp_path / "run", points, "examples.mixture:Nets")
    output = capsys.readouterr().out
    assert "300 records of 2 numbers" in output
    assert "fd_values" in output
    for name in ("reals.png", "fakes000000.png", "report.html", "model/model.safetensors"):
        assert (run / name).exists()
    nets = "--nets=examples.mixture:Nets"
    assert main(["sample", str(run), nets, "--count=5", f"--out={tmp_path}/a.npz"]) == 0
    assert main(["sample", str(run), nets, "--count=5", f"--out={tmp_path}/a.png"]) == 0
    with np.load(tmp_path / "a.npz") as samples:
        assert samples["x"].shape == (5, 2)
        assert samples["x"].dtype == np.float32
        assert samples["labels"].shape == (5,)
    assert main(["eval", str(run), nets, "--metrics=kid", "--count=40"]) == 0
    assert "kid_values" in capsys.readouterr().out
    assert main(["export", str(run), nets, f"--out={tmp_path}/model"]) == 0
    assert "examples.mixture:Nets" in expect_usage_error(capsys, "sample", run, "--out=a.png")
    assert "--nets" in expect_usage_error(capsys, "eval", run)
    assert "Use samples.npz" in expect_usage_error(capsys, "sample", run, nets, f"--out={tmp_path}/folder")
    with advises("trained with your own networks, which files never run. Use --nets examples.mixture:Nets"):
        load_model(run)
    assert main(["train", str(run / "run.yaml"), "-n"]) == 0
    model = load_model(run, nets="examples.mixture:Nets")
    assert model.sampler.images(range(3), np.array([0, 1, 1])).shape == (3, 2)
    # and on
    trained(run, points, "examples.mixture:Nets", "--kimg=0.096")
    assert "is complete" not in capsys.readouterr().out


def test_reconstructions_from_the_command_line(tmp_path, capsys):
    objective = "--objective=examples.tokenizer:Objective"
    run = trained(tmp_path / "run", "digits", "examples.tokenizer:Nets", objective, "--objective.matching=2")
    assert "matching: 2" in (run / "run.yaml").read_text()
    nets = "--nets=examples.tokenizer:Nets"
    assert main(["sample", str(run), nets, "--count=12", f"--out={tmp_path}/a.npz"]) == 0
    assert main(["eval", str(run), nets, "--metrics=fd", "--count=64"]) == 0
    with np.load(tmp_path / "a.npz") as samples:
        assert samples["images"].shape == (12, 8, 8, 1)
        np.testing.assert_array_equal(samples["labels"], pg.load_data("digits", resolution=8).labels[:12])
    with advises(
        "examples.tokenizer:Nets: its input is data. Use --data PATH (in Python, dataset=paragan.DataOptions(PATH))"
    ):
        load_model(run, nets="examples.tokenizer:Nets")
    dataset = pg.load_data("digits", resolution=8)
    assert load_model(run, nets="examples.tokenizer:Nets", dataset=dataset).sample(3).shape == (3, 8, 8, 1)


def test_a_game_for_every_label(points, tmp_path):
    run = trained(tmp_path / "run", points, "examples.mixture:Nets", "--strategy=per-label", "--kimg=0.128")
    out = f"--out={tmp_path}/a.npz"
    assert main(["sample", str(run), "--nets=examples.mixture:Nets", "--labels=0,1", "--count=4", out]) == 0
    assert main(["status", str(run)]) == 0
    with np.load(tmp_path / "a.npz") as samples:
        assert samples["x"].shape == (4, 2)


def test_another_network_of_the_same_name_is_recognised_by_its_layers(points, tmp_path, monkeypatch, capsys):
    run = trained(tmp_path / "run", points, "examples.mixture:Nets")
    from examples import mixture

    class Other(mixture.Network):
        def __init__(self, *sizes: int):
            super().__init__(*sizes)
            self.more = nn.Linear(3, 3)

    monkeypatch.setattr(mixture, "Network", Other)
    words = ("train", "custom", "--nets=examples.mixture:Nets", f"--data={points}", f"--run-dir={run}", *SMALL)
    message = expect_usage_error(capsys, *words, "--kimg=1")
    assert "another network for G: more.weight absent, now [3, 3]" in message


# From Python ------------------------------------------------------------------------------------------


class G(nn.Module):
    """Whatever a test adds to a small network."""

    latent = 4

    def __init__(self, *more: nn.Module, size: int = 2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), *more, nn.Linear(8, size))

    def forward(self, z: Tensor, y: Tensor | None) -> Tensor:
        return self.net(z)


class D(nn.Module):
    def __init__(self, *more: nn.Module):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), *more, nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return self.net(x).squeeze(1)


VECTORS = np.random.default_rng(1).standard_normal((64, 2)).astype(np.float32)


def manager(merge: int = 0, graph: bool = False, data: Any = None, **fields: Any) -> pg.ScalingManager:
    evaluation = pg.EvaluationOptions(metrics=("fd",), count=32)
    config = pg.Config(
        device=pg.DeviceOptions(precision="float32", lanes_per_pass=merge, capture_passes=graph),
        evaluation=evaluation,
        **fields,
    )
    return pg.ScalingManager(config, bs=16, num_workers=4, dataset=pg.from_arrays(VECTORS) if data is None else data)


def test_arrays_and_modules_from_python():
    with manager() as scale_mgr:
        gan = pg.Estimator(G(), D())
        for _ in range(3):
            scale_mgr.train(gan)
        assert scale_mgr.eval("fd").name == "fd_values"


class Matching:
    """An objective of one's own as any object."""

    second_order = False

    def discriminator(self, d, real, fake, step):
        return pg.Loss((d(fake.images, None).logits - d(real.images, None).logits).mean())

    def generator(self, d, fake, real, step):
        return pg.Loss((fake.images - real.images).square().mean() - d(fake.images, None).logits.mean())


class ImageEmbeddingD(D):
    def forward(self, x: Tensor, y: Tensor | None) -> pg.DiscriminatorOutput:
        return pg.DiscriminatorOutput(super().forward(x, y), embedding=x)


@pytest.mark.parametrize("shape", [(6,), (2, 9), (1, 8, 8), (1, 4, 4, 4)], ids=str)
def test_any_shape_with_a_user_objective_and_data_for_g(shape):
    size = int(np.prod(shape))

    class Back(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(size, size)

        def forward(self, x, y):
            return self.net(x.flatten(1)).view(-1, *shape)

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(size, 1)

        def forward(self, x, y):
            return pg.DiscriminatorOutput(self.net(x.flatten(1)).squeeze(1))

    x = np.random.default_rng(0).standard_normal((40, *shape))
    with manager(data=pg.from_arrays(x), objective=Matching()) as scale_mgr:
        gan = pg.Estimator(Back(), Critic(), conditioning_input=lambda real: real.images)
        line = scale_mgr.train(gan)
        assert all(np.isfinite(value) for name, value in line.items() if name.startswith("Loss/"))
        scale_mgr.eval("fd")


def test_dropout_is_the_same_in_the_same_round():
    def played(rounds: int) -> Tensor:
        torch.manual_seed(0)
        with manager() as scale_mgr:
            gan = pg.Estimator(G(nn.Dropout()), D())
            for _ in range(rounds):
                scale_mgr.train(gan)
                torch.rand(7)
            return scale_mgr._session.game.g.flat.params.clone()

    assert torch.equal(played(2), played(2))


class Peculiar(nn.Module):
    """A layer used twice under two names, and another that is frozen as it was drawn, whatever the seed."""

    def __init__(self):
        super().__init__()
        self.once = self.shared = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.frozen.weight.copy_(torch.from_numpy(np.random.default_rng().standard_normal((8, 8))))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.shared(self.once(x)))


@config_class
class PeculiarNets:
    name: str = "peculiar"
    latent: int = 4

    def generator(self, spec: Any) -> nn.Module:
        return G(Peculiar())

    def discriminator(self, spec: Any) -> nn.Module:
        return D(Peculiar())


def test_shared_and_frozen_layers_are_in_every_file(tmp_path):
    nets: Any = PeculiarNets()
    data, run = pg.from_arrays(VECTORS), dataclasses.replace(run_of("mixture", {"name": "gossip"}), nets=nets)
    first = session(run, data)
    play_round(first)
    saved = checkpoint.Checkpoints(tmp_path, first.world).save(
        first.game.players, {"step": 1, "images": first.clock.images, "seconds": 0.0}, {}, first.role
    )
    then = session(run, data, start=saved)
    assert tiny_run.is_equal(tiny_run.session_state(first), tiny_run.session_state(then))
    spec = make_spec(resolve(run, data).data, data)
    save_model(tmp_path / "model", first.game.g.net, None, make_model_config(nets, spec, LabelPrior(()), ()))
    g = nets.generator(spec)
    read_consistent(tmp_path / "model").load_into(g)
    assert tiny_run.is_equal(g.state_dict(), dict(first.game.g.net.state_dict()))
    assert len(checkpoint.untrained_tensors(first.game.g)) == 2


# What is refused --------------------------------------------------------------------------------------


class Moves(nn.Module):
    """Gives its weight other memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clone()
        return x * self.weight


class Grows(Moves):
    """Makes a parameter when it is first needed."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(8))
        return x * self.late * self.weight


class Spread(nn.Module):
    """What StyleGAN tells D: how far the images of a pass are apart."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.std(0)


class Counts(nn.Module):
    """Normalises by what it has seen so far."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no such thing")


class Leaves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise SystemExit(0)


class Undefined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan")


class Numpy(nn.Module):
    """Draws what torch does not know of."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 10 ** float(np.random.default_rng().uniform(0, 12))


class Extra(nn.Identity):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 1}


class Expanded(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1).expand(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Labelled(G):
    def forward(self, z: Tensor, y: Tensor | None) -> Tensor:
        return self.net(z) + nn.functional.one_hot(y, 2)


class UnlabeledD(D):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(1)


class Long(D):
    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return self.net(x)[:-1, 0]


INVALID_NETS = {
    "no parameters": (G, lambda: nn.Flatten(), ["no parameters"]),
    "not finite": (G, lambda: D(Undefined()), ["the loss of D is nan"]),
    "other random numbers": (lambda: G(Numpy()), D, ["net.2 of G: returns something else in every pass", "torch.rand"]),
    "its own error": (lambda: G(Breaks()), D, ["KeyError", "no such thing"]),
    "its own end": (lambda: G(Leaves()), D, ["SystemExit"]),
    "labels wanted": (Labelled, D, ["labels that are None"]),
    "labels not taken": (G, UnlabeledD, ["the discriminator or the objective fails", "positional argument"]),
}


@pytest.mark.parametrize("case", INVALID_NETS)
def test_untrainable_networks_raise_usage_errors(case):
    make_g, make_d, words = INVALID_NETS[case]
    with manager() as scale_mgr, pytest.raises(UsageError) as raised:
        scale_mgr.train(pg.Estimator(make_g(), make_d()))
    for word in words:
        assert word in str(raised.value)


class RenamedNorm(nn.BatchNorm1d):
    """A subclass, which cannot be normalised lane by lane in a merged pass."""


class Double(G):
    def __init__(self):
        super().__init__()
        self.double()

    def forward(self, z: Tensor, y: Tensor | None) -> Tensor:
        return self.net(z.double()).float()


class Replaces(Counts):
    """Makes its buffer anew, where it could be written."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9
        return x


class Writes(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9)
        return x


class Keeps(Moves):
    """Changes its weight in place."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(0.5, 2)
        return x * self.weight


def expanded_clone() -> nn.Module:
    layer = Expanded()
    layer.gain = nn.Parameter(torch.ones(1).expand(8).clone())
    return layer


LANE_BY_LANE = {"lanes_per_pass": 1}
CAPTURE = {"capture_passes": True, "lanes_per_pass": 1}
SENT_AS_INT8 = from_dict(Run, {"strategy": {"name": "sync", "wire": "int8"}}).strategy
Trial = tuple[Callable[[], nn.Module], Callable[[], nn.Module], dict[str, Any]]  # G, D, settings
REFUSED_NETS: dict[str, tuple[Trial, Any, list[Trial]]] = {  # what is refused, the advice, what it advises
    "shape": (
        (lambda: G(size=3), D, {}),
        advises("generator: returned [8, 3] for 8 latents. Return [8, 2]"),
        [(G, D, {})],
    ),
    "logits": ((G, Long, {}), advises("discriminator: returned [7] for 8 images. Return logits of [8]"), [(G, D, {})]),
    "lazy": (
        (lambda: G(nn.LazyLinear(8)), D, {}),
        advises("Give its layer its sizes, and use no nn.Lazy... layer"),
        [(lambda: G(nn.Linear(8, 8)), D, {})],
    ),
    "expand": (
        (lambda: G(Expanded()), D, {}),
        advises("gain: was made with expand, its numbers share memory and cannot be set. Use clone()"),
        [(lambda: G(expanded_clone()), D, {})],
    ),
    "extra state": (
        (lambda: G(Extra()), D, {}),
        advises(
            "_extra_state: is extra state (dict), and files hold only tensors. Use a buffer instead of get_extra_state"
        ),
        [(lambda: G(Writes()), D, {})],
    ),
    "other memory": (
        (lambda: G(Moves()), D, {}),
        advises(
            "weight of G: gets other memory in a forward pass, so it would not be trained. Create parameters in "
            "__init__, and change them in place"
        ),
        [(lambda: G(Keeps()), D, {})],
    ),
    "late": (
        (lambda: G(Grows()), D, {}),
        advises("late of G: is created in a forward pass, so it would not be trained. Create parameters in __init__"),
        [(lambda: G(Keeps()), D, {})],
    ),
    "coupled": (
        (G, lambda: D(Spread()), {}),
        advises(
            "net.2 of D: couples the images of a pass in a way that lanes cannot see. "
            "Use device.lanes_per_pass=1 (lane by lane)"
        ),
        [(G, lambda: D(Spread()), LANE_BY_LANE)],
    ),
    "running": (
        (lambda: G(Counts()), D, {}),
        advises(
            "net.2.mean of G: changes in a forward pass, in a way that lanes cannot see. "
            "Use device.lanes_per_pass=1 (lane by lane)"
        ),
        [(lambda: G(Counts()), D, LANE_BY_LANE)],
    ),
    "norm": (
        (lambda: G(RenamedNorm(8)), D, {}),
        advises(
            "net.2: normalises over the batch in a way that lanes cannot see. "
            "Use device.lanes_per_pass=1 (lane by lane)"
        ),
        [(lambda: G(RenamedNorm(8)), D, LANE_BY_LANE)],
    ),
    "dtypes": (
        (lambda: G(nn.Linear(8, 8).double()), D, {}),
        advises("has parameters of several dtypes or devices. Use one dtype and one device"),
        [(lambda: G(nn.Linear(8, 8)), D, {}), (Double, D, {})],
    ),
    "wire": (
        (Double, D, {"strategy": SENT_AS_INT8}),
        advises("strategy.wire=int8: G has float64 parameters. Use strategy.wire=exact"),
        [(Double, D, {})],
    ),
    "capture, own objective": (
        (G, ImageEmbeddingD, CAPTURE | {"objective": Matching()}),
        advises("device.capture_passes=true: records the passes of built-in objectives only. Leave it out"),
        [(G, ImageEmbeddingD, {"objective": Matching()})],
    ),
    "capture, dropout": (
        (lambda: G(nn.Dropout()), D, CAPTURE),
        advises("device.capture_passes=true: would record the random numbers that these networks draw. Leave it out"),
        [(lambda: G(nn.Dropout()), D, {})],
    ),
    "capture, buffer": (
        (G, lambda: D(Replaces()), CAPTURE),
        advises("a forward pass replaces layers.net.2.mean of D. Write into it (add_), or leave it out"),
        [(G, lambda: D(Writes()), CAPTURE), (G, lambda: D(Replaces()), {})],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED_NETS)
def test_networks_that_are_refused_are_trained_as_advised(case):
    refused, refusal, advised = REFUSED_NETS[case]
    with refusal:
        start(*refused)
    for trial in advised:
        start(*trial)


def start(make_g: Callable[[], nn.Module], make_d: Callable[[], nn.Module], settings: dict[str, Any]) -> None:
    """Train for a round, but where passes are captured, which takes long to compile."""
    device_fields = {field.name for field in dataclasses.fields(pg.DeviceOptions)}
    device = {name: value for name, value in settings.items() if name in device_fields}
    fields = {name: value for name, value in settings.items() if name not in device_fields}
    with manager(device.get("lanes_per_pass", 0), device.get("capture_passes", False), **fields) as scale_mgr:
        gan = pg.Estimator(make_g(), make_d())
        if device.get("capture_passes"):
            assert scale_mgr._get_session(gan)
        else:
            assert scale_mgr.train(gan)["Progress/step"] == 1


class Branches(nn.Module):
    """Reads a value of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 1 else x


def test_a_pass_that_cannot_be_captured_is_trained_as_advised():
    with (
        manager(merge=1, graph=True) as scale_mgr,
        advises(
            "device.capture_passes=True: a pass could not be traced (it reads a value of a tensor). Use "
            "device.capture_passes=False",
            pg.RunError,
        ),
    ):
        scale_mgr.train(pg.Estimator(G(Branches()), D()))
    start(lambda: G(Branches()), D, LANE_BY_LANE)


class NoScalar(Matching):
    def generator(self, d, fake, real, step):
        return pg.Loss(d(fake.images, None).logits)


class NoGradient(Matching):
    def generator(self, d, fake, real, step):
        return pg.Loss(d(fake.images.detach(), None).logits.mean())


class Shows(Matching):
    def generator(self, d, fake, real, step):
        return pg.Loss(d(fake.images, None).logits.mean(), {"G/distance": 1.0})


class RelativisticAverage(Matching):
    """Compares every logit with the mean over the batch (Jolicoeur-Martineau 2018)."""

    def discriminator(self, d, real, fake, step):
        r, f = d(real.images, None).logits, d(fake.images, None).logits
        return pg.Loss((nn.functional.softplus(f.mean() - r) + nn.functional.softplus(f - r.mean())).mean())


class Sum(Matching):
    def generator(self, d, fake, real, step):
        return pg.Loss(-d(fake.images, None).logits.sum())


class Mean(Matching):
    def generator(self, d, fake, real, step):
        return pg.Loss(-d(fake.images, None).logits.mean())


class BatchStatistic(Matching):
    """Feature matching by means over the batch."""

    def generator(self, d, fake, real, step):
        return pg.Loss((fake.images.mean(0) - real.images.mean(0)).square().mean())


def estimator() -> pg.Estimator:
    return pg.Estimator(G(), ImageEmbeddingD())


@pytest.mark.parametrize(
    ("objective", "name", "means"),
    [
        (RelativisticAverage(), "gradient of D", Matching()),
        (Sum(), "loss of G", Mean()),
        (BatchStatistic(), "loss of G", Matching()),
    ],
    ids=["relativistic average", "sum", "feature matching"],
)
def test_objectives_that_couple_lanes_are_trained_as_advised(objective, name, means):
    with (
        manager(objective=objective) as scale_mgr,
        advises(
            f"objective: the {name} is not the mean of those of its lanes, so n ranks would train otherwise than one "
            "(it is a sum, or has a statistic over the batch). Use means over images, or device.lanes_per_pass=1 "
            "(lane by lane)"
        ),
    ):
        scale_mgr.train(estimator())
    for advised in (manager(merge=1, objective=objective), manager(objective=means)):
        with advised as scale_mgr:
            assert scale_mgr.train(estimator())["Progress/step"] == 1


class Parts(Matching):
    def generator(self, d, fake, real, step):
        logits = d(fake.images, None).logits
        return pg.Loss(logits.mean(), {"G/distance": logits.detach().mean()})


def test_an_objective_without_a_gradient_is_refused():
    with manager(objective=NoGradient()) as scale_mgr, pytest.raises(UsageError, match="none of its parameters"):
        scale_mgr.train(pg.Estimator(G(), ImageEmbeddingD()))


@pytest.mark.parametrize(
    ("objective", "refusal", "advised"),
    [
        (NoScalar(), advises("a Loss of a tensor [8] for G. Return a paragan.Loss of a scalar"), Matching()),
        (
            Shows(),
            advises("Loss.parts['G/distance']: must be a scalar tensor, got float. Use x.detach().mean()"),
            Parts(),
        ),
    ],
    ids=["no scalar", "parts"],
)
def test_objectives_that_are_refused_are_trained_as_advised(objective, refusal, advised):
    gan = pg.Estimator(G(), ImageEmbeddingD())
    with manager(objective=objective) as scale_mgr, refusal:
        scale_mgr.train(gan)
    with manager(objective=advised) as scale_mgr:
        assert scale_mgr.train(gan)["Progress/step"] == 1


def test_errors_in_user_code_are_one_line(points, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "from paragan.core.schema import config_class\n"
        "import torch.nn as nn\n"
        "@config_class\nclass Odd:\n    name: str = 'odd'\n"
        "    def generator(self, spec): return nn.Linear(1, 1)\n"
        "    discriminator = generator\n"
    )
    monkeypatch.chdir(tmp_path)
    base = ("train", "custom", f"--data={points}", "--run-dir=run")
    assert "latent: is missing" in expect_usage_error(capsys, *base, "--nets=mine:Odd")
    assert "has no generator, discriminator" in expect_usage_error(capsys, *base, "--nets=examples.own_wire:Ternary")
    assert "makes images" in expect_usage_error(capsys, *base)
    assert "second_order" in expect_usage_error(capsys, *base, "--objective=examples.mixture:Nets")
    numbers = (*base, "--nets=examples.mixture:Nets")
    assert "objective.augment=ada: transforms images" in expect_usage_error(capsys, *numbers, "--objective.augment=ada")
    assert "data.resolution" in expect_usage_error(capsys, *base, "--nets=examples.mixture:Nets", "--data.resolution=8")
    assert not Path("run").exists()


OWN_NETS = """
from torch import nn
from examples.mixture import Nets
from paragan.core.schema import config_class

@config_class
class NoModules(Nets):
    def generator(self, spec): return super().generator(spec).forward

@config_class
class Modules(Nets):
    def generator(self, spec): return super().generator(spec)

class LongD(nn.Linear):
    def forward(self, x, y): return super().forward(x)[1:, 0]

class OneLogitD(nn.Linear):
    def forward(self, x, y): return super().forward(x)[:, 0]

@config_class
class LongLogits(Modules):
    def discriminator(self, spec): return LongD(2, 1)

@config_class
class Logits(Modules):
    def discriminator(self, spec): return OneLogitD(2, 1)
"""
TOKENIZER = "train custom -n --data=digits --nets=examples.tokenizer:Nets --objective=examples.tokenizer:Objective"
COMMAND_CASES = [
    Case(f"{TOKENIZER} --g_batch=256", "G is given the images of the batch. Leave --g_batch out", ("~g_batch",)),
    Case(
        "train custom -n --data=POINTS --nets=own:NoModules",
        "own:NoModules.generator: returned method. Return an nn.Module",
        ("~nets --nets=own:Modules",),
    ),
    Case(
        "train custom -n --batch=16 --lanes=4 --data=POINTS --nets=own:LongLogits",
        "discriminator: returned [7] for 8 images. Return logits of [8]",
        ("~nets --nets=own:Logits",),
    ),
    Case(
        "train custom -n --data=POINTS --nets=examples.mixture:Nets --evaluation.features=resnet20",
        "evaluation.features=resnet20: needs images, and the data are arrays. Use values",
        ("--evaluation.features=values",),
    ),
]


@pytest.mark.parametrize("case", COMMAND_CASES, ids=case_id)
def test_advice_on_own_networks_and_data_works(case, check_advice, points, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN_NETS)
    monkeypatch.chdir(tmp_path)
    check_advice(case._replace(arguments=case.arguments.replace("POINTS", str(points))))


def test_invalid_arrays_raise_usage_errors(tmp_path):
    for x, word in (
        (np.zeros((4, 2), np.int64), "floating point"),
        (np.zeros(4), "expected [N, ...]"),
        (np.zeros((4, 0)), "expected [N, ...]"),
        (np.full((4, 2), np.nan), "8 numbers of x are not finite"),
        (np.full((4, 2), 1e300), "not finite"),
    ):
        np.savez(tmp_path / "a.npz", x=x)
        np.save(tmp_path / "a.npy", x)
        for where in (tmp_path / "a.npz", tmp_path / "a.npy"):
            with pytest.raises(UsageError) as raised:
                pg.load_data(str(where), resolution=None)
            assert word in str(raised.value)
        with pytest.raises(UsageError):
            pg.from_arrays(x)
    np.save(tmp_path / "a.npy", np.array([None]), allow_pickle=True)
    with pytest.raises(UsageError, match="is not an array"):
        pg.load_data(str(tmp_path / "a.npy"), resolution=None)
    with pytest.raises(UsageError, match="labels"):
        pg.from_arrays(VECTORS, np.zeros(3, np.int64))


def test_images_from_arrays_are_images():
    digits = pg.load_data("digits", resolution=8)
    copied = pg.from_arrays(digits.images, digits.labels, digits.classes)
    assert dataclasses.replace(copied, notes=digits.notes).fingerprint == digits.fingerprint
    with pytest.raises(UsageError, match="Use channels=C"):
        pg.from_arrays(np.zeros((3, 8, 9, 5), np.uint8))
