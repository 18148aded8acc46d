"""The reconstruction objective: its terms, and what is refused by name."""

from __future__ import annotations

import sys
from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tiny_run
from advice import Case, advises, case_id
from paragan.config.validate import validate
from paragan.core.errors import UsageError
from paragan.core.frozen_features import load_frozen
from paragan.core.rng import LaneRng
from paragan.core.schema import config_class
from paragan.core.spectrograms import MelConfig, mel_filters
from paragan.core.types import Batch, DiscriminatorOutput, primary_array
from paragan.losses.adversarial import Adversarial
from paragan.losses.reconstruction import Reconstruction
from paragan.losses.running_state import attach_state

GAME = (
    *("nets=vq-autoencoder", "nets.width=4", "nets.downsample=1", "nets.codes=16", "nets.code_dim=4"),
    *("nets.d_width=4", "nets.d_layers=1", "objective=reconstruction"),
)


class Output(NamedTuple):
    images: Tensor
    commitment: Tensor
    level: Tensor


class Signal(NamedTuple):
    signal: Tensor


class Wave(NamedTuple):
    wave: Tensor


class Pooling(nn.Module):
    """Two feature maps."""

    def forward(self, x):
        return [x.mean((2, 3)), x[:, :, ::2, ::2]]


class Summed(Pooling):
    """No list."""

    def forward(self, x):
        return x.mean((2, 3))


def not_a_module():
    return "text"


def judge(images, labels=None):
    return DiscriminatorOutput(images.mean((2, 3)), features=(2 * images,))


def make_batch(images, **fields):
    return Batch(images, None, LaneRng(0, 0, (0, 1), 2), fields=fields)


def example():
    torch.manual_seed(0)
    return make_batch(torch.randn(4, 3, 4, 4), commitment=torch.tensor(0.5)), make_batch(torch.randn(4, 3, 4, 4))


def test_terms_are_added_with_their_weights():
    fake, real = example()
    objective = Reconstruction(
        l1=2.0,
        l2=3.0,
        perceptual=0.5,
        perceptual_features=f"{__name__}:Pooling",
        feature_matching=0.25,
        outputs={"commitment": 4.0},
        adversarial_weight=0.1,
    )
    loss = objective.generator(judge, fake, real, 0)
    x, y = fake.images, real.images
    perceptual = sum((a - b).abs().mean() for a, b in zip(Pooling()(x), Pooling()(y)))
    expected = {
        "G/l1": (2.0, (x - y).abs().mean()),
        "G/l2": (3.0, (x - y).square().mean()),
        "G/perceptual": (0.5, perceptual),
        "G/feature_matching": (0.25, (2 * x - 2 * y).abs().mean()),
        "G/adversarial": (0.1, -x.mean()),
        "G/commitment": (4.0, torch.tensor(0.5)),
    }
    assert loss.parts.keys() == expected.keys()
    for name, (_, value) in expected.items():
        torch.testing.assert_close(loss.parts[name], value)
    torch.testing.assert_close(loss.total, sum(weight * value for weight, value in expected.values()))


def test_the_loss_of_d_is_that_of_the_adversarial_part():
    fake, real = example()
    adversarial = Adversarial(loss="least_squares")
    objective = Reconstruction(adversarial=adversarial)
    torch.testing.assert_close(
        objective.discriminator(judge, real, fake, 0).total, adversarial.discriminator(judge, real, fake, 0).total
    )


def test_several_discriminators_are_summed_and_their_patches_averaged():
    logits = torch.tensor([[1.0, 3.0, 10.0], [5.0, 7.0, 20.0]])
    output = DiscriminatorOutput(logits, patches=(2, 1))
    assert float(output.mean(logits)) == 4 + 15
    assert output.image_logits.tolist() == [2 + 10, 6 + 20]
    first, second = output.split(1)
    assert (first.logits.tolist(), second.patches) == ([[1, 3, 10]], (2, 1))


FIELD = "objective.perceptual_features"
REFUSED = [
    Case(
        "objective.l1=0", "objective.l1=0: no distance to the data is left. Use --objective.l1=1", ("objective.l1=1",)
    ),
    Case(
        "objective.perceptual=1",
        "objective.perceptual=1: needs objective.perceptual_features, and the other way round. Set both, such as "
        "--objective.perceptual=1 --objective.perceptual_features=mine:features",
        (f"objective.perceptual_features={__name__}:Pooling",),
    ),
    Case(
        "objective.adversarial.orthogonal=1",
        "objective.adversarial.orthogonal: has no effect beside a distance to the data. "
        "Use objective.adversarial.orthogonal=0",
        ("objective.adversarial.orthogonal=0",),
    ),
    Case(
        "objective.feature_matching=2 objective.adversarial.augment=diffaugment",
        "objective.feature_matching=2: compares images that are not augmented. Use "
        "objective.adversarial.augment=none, or objective.feature_matching=0",
        ("objective.adversarial.augment=none", "objective.feature_matching=0"),
    ),
    Case(
        "nets=dcgan ~nets.",
        "objective=reconstruction: compares what G makes of real data with these, and --nets=dcgan makes images from "
        "latents. Use --nets=vq-autoencoder, or networks of your own with conditioning_input",
        ("nets=vq-autoencoder nets.d_layers=1",),
    ),
    Case(
        "d.start_kimg=2",
        "d.start_kimg=2: the run ends at --kimg=1. Use --d.start_kimg=0.5",
        ("d.start_kimg=0.5",),
    ),
    Case(
        "d.start_kimg=0.1 strategy=async",
        "d.start_kimg=0.1: every round of --strategy=async trains both players. Use --d.start_kimg=0 "
        "--d.weight_warm_up_kimg=0",
        ("d.start_kimg=0 d.weight_warm_up_kimg=0",),
    ),
    Case(
        "d.start_kimg=0.1 objective=adversarial",
        "d.start_kimg=0.1: without D this objective leaves G no loss. Use objective=reconstruction, or "
        "--d.start_kimg=0 --d.weight_warm_up_kimg=0",
        ("objective=reconstruction", "d.start_kimg=0 d.weight_warm_up_kimg=0"),
    ),
]


def settings_of(*texts):
    """Settings of the game with changes: `~word` leaves out those that begin with it, `objective=adversarial` all."""
    words = [word for text in texts for word in text.split()]
    removed = tuple(word[1:] for word in words if word.startswith("~"))
    kept = [setting for setting in GAME if not (removed and setting.startswith(removed))]
    kept += [word for word in words if not word.startswith("~")]
    last = [word for word in kept if word.startswith("objective=")][-1]
    kept = [word for word in kept if not word.startswith("objective=")]
    return kept if last == "objective=adversarial" else [last, *kept]


@pytest.mark.parametrize("case", REFUSED, ids=case_id)
def test_fields_that_contradict_each_other_are_refused(case):
    with advises(case.advice):
        validate(tiny_run.make_run(*settings_of(case.arguments)))
    for follow in case.follow:
        tiny_run.make_session(tiny_run.make_run(*settings_of(case.arguments, follow)))


def test_features_that_cannot_be_made_are_refused():
    cpu = torch.device("cpu")
    with advises(
        "objective.perceptual_features=nowhere:Pooling: ModuleNotFoundError: No module named 'nowhere'. Use "
        "module:callable, where the callable returns an nn.Module, and start in the folder of the module"
    ):
        load_frozen(FIELD, "nowhere:Pooling", cpu)
    with advises(
        f"objective.perceptual_features={__name__}:not_a_module: is a callable that returned str. Return an nn.Module"
    ):
        load_frozen(FIELD, f"{__name__}:not_a_module", cpu)
    assert __name__ in sys.modules
    assert not load_frozen(FIELD, f"{__name__}:Pooling", cpu).training


def test_features_are_lists_of_maps_as_advised():
    fake, real = example()
    name = f"{__name__}:Pooling"
    with advises(
        f"objective.perceptual_features={__name__}:Summed: the network returned Tensor. Let it return a list of "
        "feature maps [N, ...]"
    ):
        Reconstruction(perceptual=1.0, perceptual_features=f"{__name__}:Summed").generator(judge, fake, real, 0)
    Reconstruction(perceptual=1.0, perceptual_features=name).generator(judge, fake, real, 0)


def test_spectrograms_fit_as_advised():
    def check(**fields):
        Reconstruction(l1=0.0, mel=1.0, spectrogram=MelConfig(**fields)).check_waves((1, 1024))

    with advises(
        "objective.spectrogram.f_max=5000: is above half the sample rate, 4000. Use objective.spectrogram.f_max=0"
    ):
        check(f_max=5000.0)
    with advises(
        "objective.spectrogram.f_min=3000: is not below the largest frequency, 2000. Use objective.spectrogram.f_min=0"
    ):
        check(f_min=3000.0, f_max=2000.0)
    check(f_min=0.0, f_max=0.0)


def test_what_g_or_d_do_not_return_is_named():
    fake, real = example()
    for name in ("kl", "images"):
        with advises(f"objective.outputs: G returns no scalar '{name}'. Use names of commitment"):
            Reconstruction(outputs={name: 1.0}).generator(judge, fake, real, 0)
    Reconstruction(outputs={"commitment": 1.0}).generator(judge, fake, real, 0)
    matching = Reconstruction(feature_matching=1.0)
    with advises(
        "objective.feature_matching=1: D returns no features. Return a paragan.DiscriminatorOutput with features, or "
        "use objective.feature_matching=0"
    ):
        matching.generator(lambda x, y: x.mean((1, 2, 3)), fake, real, 0)
    matching.generator(judge, fake, real, 0)
    Reconstruction().generator(lambda x, y: x.mean((1, 2, 3)), fake, real, 0)


def test_an_adaptive_weight_needs_a_last_layer_and_its_state():
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    g, adaptive = Generator(), Reconstruction(weighting="adaptive")
    with advises(
        "objective.weighting=adaptive: G has no last_layer. Let its class have a property last_layer that returns the "
        "weight of its last layer, or use objective.weighting=fixed"
    ):
        adaptive.make_g_state(g)
    assert Reconstruction(weighting="fixed").make_g_state(g) is None
    Generator.last_layer = property(lambda self: self.scale)
    fake, real = example()
    with advises(
        "objective.weighting: G has no objective state. Use attach_state(objective.make_g_state(g), g), and fakes with "
        "generator=g"
    ):
        adaptive.generator(judge, fake, real, 0)
    attach_state(adaptive.make_g_state(g), g)
    fake = Batch(fake.images * g.scale, None, fake.rng, fields=fake.fields, generator=g)
    adaptive.generator(judge, fake, real, 0)


def test_the_array_that_d_judges_has_a_name_that_is_expected():
    output = Output(*torch.ones(3))
    assert primary_array(output) is output.images
    assert primary_array(output, "level") is output.level
    assert primary_array(output.images) is output.images
    with advises("generator: returned Signal(signal), and D judges the field 'wave'. Name one of them wave"):
        primary_array(Signal(torch.ones(2)), "wave")
    primary_array(Wave(torch.ones(2)), "wave")


# networks and objectives of the user's own ------------------------------------------------------------------------


class Codebook(nn.Module):
    """Counts rows by the sign of their sum; `mistake` makes it wrong."""

    synchronised = ("counts",)

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        self.register_buffer("counts", torch.zeros(2))

    def forward(self, x):
        if self.mistake == "average":
            self.counts.lerp_(torch.ones(2) * len(x), 0.5)
        if self.mistake == "backward" and x.requires_grad:
            x.register_hook(self.count_backward)
        if self.training and not self.mistake:
            self.counts += len(x)
        return x

    def count_backward(self, gradient):
        self.counts.add_(1)


class UserG(nn.Module):
    def __init__(self, mistake):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.codebook = Codebook(mistake)

    def forward(self, x, y):
        images = self.codebook(x * self.scale)
        return Output(images, self.scale.square(), images.flatten(1)[:, :2])


class UserD(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 1)

    def forward(self, x, y):
        return self.layer(x.flatten(1))[:, 0]


@config_class
class Nets:
    name: str = f"{__name__}:Nets"
    mistake: str = ""

    def generator(self, spec):
        return UserG(self.mistake)

    def discriminator(self, spec):
        return UserD()

    def conditioning_input(self, real):
        return real.images


@config_class
class UserObjective:
    """Judges images and what G returned beside them."""

    name: str = f"{__name__}:UserObjective"
    replayed: str = "level"
    always_judges: bool = False
    second_order: ClassVar[bool] = False

    @property
    def replayed_fields(self):
        return (self.replayed,)

    def discriminator(self, d, real, fake, step):
        import paragan as pg

        assert len(fake.fields[self.replayed]) == len(fake.images)
        return pg.Loss(d(fake.images, None).mean() - d(real.images, None).mean() + 0 * fake.fields["level"].mean())

    def generator(self, d, fake, real, step):
        import paragan as pg

        loss = (fake.images - real.images).square().mean() + fake.fields["commitment"]
        if fake.adversarial_weight or self.always_judges:
            loss = loss - fake.adversarial_weight * d(fake.images, None).mean()
        return pg.Loss(loss)


USER = (f"nets={__name__}:Nets", f"objective={__name__}:UserObjective")


@pytest.mark.parametrize("strategy", ["sync", "async", "quantized"])
def test_fields_of_the_output_reach_both_losses_of_a_user(strategy):
    tiny_run.play_rounds(tiny_run.make_run(*USER, f"strategy={strategy}"), 3)


@pytest.mark.parametrize(
    ("case"),
    [
        Case(
            "objective.replayed=commitment",
            "replayed_fields: 'commitment' is [], and G returns images, commitment, level. Name fields with one row "
            "for each of 4 images",
            ("objective.replayed=level",),
        ),
        Case(
            "objective.always_judges=true d.start_kimg=0.1",
            "objective.generator: calls D while fake.adversarial_weight is 0, which it is until d.start_kimg. Return "
            "the part of the loss that needs no D then",
            ("objective.always_judges=false",),
        ),
        Case(
            "nets.mistake=average",
            "codebook of G: what a pass over several lanes adds to counts is not the sum of what each lane adds. Add "
            "to them in forward, and use them in apply_synchronised",
            ("nets.mistake=",),
        ),
        Case(
            "nets.mistake=backward",
            "codebook of G: backward writes to counts. Write to them in forward",
            ("nets.mistake=",),
        ),
    ],
    ids=case_id,
)
def test_mistakes_of_a_user_are_named(case):
    with advises(case.advice):
        tiny_run.make_session(tiny_run.make_run(*USER, *case.arguments.split()))
    for follow in case.follow:
        tiny_run.make_session(tiny_run.make_run(*USER, *case.arguments.split(), follow))


def test_the_mel_distance_is_that_of_a_plain_computation():
    torch.manual_seed(0)
    waves, target = (torch.rand(4, 1, 512) - 0.5 for _ in range(2))
    objective = Reconstruction(l1=0.0, mel=45.0, spectrogram=MelConfig(8000, 128, 32, 20), adversarial_weight=0.0)
    loss = objective.generator(judge, make_batch(waves), make_batch(target), 0)

    def mel(x):
        padded = torch.nn.functional.pad(x, (48, 48), mode="reflect")[:, 0]
        spectrum = torch.stft(padded, 128, 32, window=torch.hann_window(128), center=False, return_complex=True).abs()
        return (mel_filters(MelConfig(8000, 128, 32, 20)).float() @ spectrum).clamp(min=1e-5).log()

    torch.testing.assert_close(loss.total, 45 * (mel(waves) - mel(target)).abs().mean(), rtol=1e-4, atol=1e-4)


def test_a_mel_distance_needs_waves():
    batch = make_batch(torch.zeros(4, 3, 4, 4))
    short = make_batch(torch.zeros(4, 1, 200))
    objective = Reconstruction(l1=0.0, mel=45.0)
    with advises(
        "objective.mel=45: compares waves [1, T] of at least 256 samples, and the data are [3, 4, 4]. Use "
        "objective.mel=0 objective.l1=1, or audio"
    ):
        objective.generator(judge, batch, batch, 0)
    with advises(
        "objective.spectrogram.sample_rate=8000: the audio has 22050 Hz. Use objective.spectrogram.sample_rate=22050"
    ):
        objective.check_waves((1, 256), 22050)
    Reconstruction(l1=0.0, mel=45.0, spectrogram=MelConfig(sample_rate=22050)).check_waves((1, 256), 22050)
    with pytest.raises(UsageError, match="the data are \\[1, 200\\]"):
        objective.generator(judge, short, short, 0)
    assert Reconstruction(l1=1.0, mel=0.0, adversarial_weight=0.0).generator(judge, batch, batch, 0).total == 0
    wave = make_batch(torch.zeros(4, 1, 256))
    assert Reconstruction(l1=0.0, mel=45.0, adversarial_weight=0.0).generator(judge, wave, wave, 0).total == 0
