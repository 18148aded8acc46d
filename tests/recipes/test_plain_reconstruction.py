"""The plain loops of the benchmark take the steps that the recipes take: same gradients, same codebook."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.lib.plain_reconstruction import (
    PLAIN_LOOPS,
    PlainReconstruction,
    PlainTokenizer,
    PlainUpscaler,
    degrade_plainly,
    max_output_difference,
)
from benchmarks.lib.session_fixture import make_session, random_dataset
from benchmarks.speed.reconstruction import make_run
from paragan.data.dataset import Dataset
from paragan.train.loop import play_round
from paragan.train.session import Session

SMALL = ("batch=8", "lanes=2", "device.precision=float32", "data.mirror=false")
IMAGE_NETS = ("nets.width=8", "nets.d_width=8")
SETTINGS = {
    "tokenizer": (*SMALL, *IMAGE_NETS, "nets.codes=32", "nets.restart_below=0", "objective.adversarial_weight=1"),
    "super-resolution": (*SMALL, *IMAGE_NETS, "nets.blocks=2"),
    "vocoder": (*SMALL, "nets.width=16", "nets.d_width=2", "nets.resolution_width=4"),
}
FROZEN_D = ("d.optimizer.lr=1e-30",)  # so that it does not matter which of the two steps comes first


def make_data(recipe: str) -> Dataset:
    if recipe != "vocoder":
        return random_dataset(32, 3, 8)
    waves = np.random.default_rng(0).normal(0, 0.1, (8, 1, 4096)).astype(np.float32)
    return Dataset(waves, None, (), "random")


def make_both(recipe: str, *settings: str) -> tuple[Session, PlainReconstruction]:
    data = make_data(recipe)
    run = make_run(recipe, data, *SETTINGS[recipe], *settings)
    return make_session(run, data), PLAIN_LOOPS[recipe](run, data)


def play(session: Session) -> Tensor:
    """Play a round; return its images."""
    play_round(session)
    (micro_batch,) = session.lanes.micro_batches
    return micro_batch.images.contiguous()


def plain_name(name: str) -> str:
    return name.replace("parametrizations.weight.original0", "weight_g").replace(
        "parametrizations.weight.original1", "weight_v"
    )


def shaped(x: Tensor, like: Tensor) -> Tensor:
    """Return x of a paragan layer in the shape of the plain layer, whose kernel may stand along columns."""
    if x.shape != like.shape and x.dim() == like.dim():
        return x.mT
    return x.reshape(like.shape)


def check_gradients(net: nn.Module, plain: nn.Module) -> None:
    """The gradients of two networks agree."""
    parameters = dict(plain.named_parameters())
    for name, p in net.named_parameters():
        expected = parameters.pop(plain_name(name)).grad
        assert p.grad is not None
        assert expected is not None
        difference = (shaped(p.grad, expected) - expected).norm() / (expected.norm() + 1e-7)
        assert difference < 5e-3, f"{name}: {float(difference):.1e}"
    assert not parameters


@pytest.mark.parametrize("recipe", PLAIN_LOOPS)
def test_outputs_agree(recipe: str):
    data = make_data(recipe)
    assert max_output_difference(make_run(recipe, data, *SETTINGS[recipe]), data) < 1e-4


def test_steps_of_the_vocoder_are_those_of_hifi_gan():
    session, plain = make_both("vocoder")
    of_d: dict[str, Tensor | None] = {}

    def record(*args: object) -> None:
        of_d.update({name: p.grad.clone() for name, p in plain.d.named_parameters() if p.grad is not None})

    plain.d_optimizer.register_step_pre_hook(record)
    plain.train_on(play(session))
    check_gradients(session.game.g.net, plain.g)
    for name, p in plain.d.named_parameters():  # G's step has added to them
        p.grad = of_d[name]
    check_gradients(session.game.d.net, plain.d)


def test_steps_of_the_tokenizer_are_those_of_vqgan():
    session, plain = make_both("tokenizer", *FROZEN_D)
    assert isinstance(plain, PlainTokenizer)
    plain.train_on(play(session))
    check_gradients(session.game.d.net, plain.d)
    weight = session.game.g.net.get_buffer("objective_state.weight")
    torch.testing.assert_close(weight, plain.adaptive_weight, rtol=5e-3, atol=0)
    for name in ("codebook", "cluster_size", "embed_sum"):
        ours, expected = (net.get_buffer(f"quantizer.{name}") for net in (session.game.g.net, plain.g))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_the_adaptive_weight_acts_as_in_vqgan():
    session, plain = make_both("tokenizer", *FROZEN_D, "g.optimizer.lr=1e-30", "nets.decay=0.999999999")
    assert isinstance(plain, PlainTokenizer)
    play(session)  # measures the weight
    real = play(session)
    plain.train_on(real)
    before = session.game.g.net.get_buffer("objective_state.weight")
    torch.testing.assert_close(before, plain.adaptive_weight, rtol=5e-3, atol=0)
    check_gradients(session.game.g.net, plain.g)


def test_steps_of_the_upscaler_are_those_of_real_esrgan():
    session, plain = make_both("super-resolution", *FROZEN_D)
    assert isinstance(plain, PlainUpscaler)
    real = play(session)
    (micro_batch,) = session.lanes.micro_batches
    assert session.game.conditioning_input
    low = session.game.conditioning_input(micro_batch)
    plain.train_on_pair(low, real)
    check_gradients(session.game.g.net, plain.g)
    check_gradients(session.game.d.net, plain.d)


def test_plain_degradations_are_small_images_in_range():
    torch.manual_seed(0)
    images = torch.rand(4, 3, 32, 32) * 2 - 1
    low = degrade_plainly(images, 2, max_blur=0.6, max_noise=0.04)
    assert low.shape == (4, 3, 16, 16)
    assert low.abs().max() <= 1
    constant = degrade_plainly(torch.full((2, 3, 32, 32), 0.5), 2, max_blur=0.6, max_noise=0)
    torch.testing.assert_close(constant, torch.full_like(constant, 0.5))
