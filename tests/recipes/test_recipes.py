"""Recipes: each is a complete run of networks that fit its data, and says what was published."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paragan.cli.train import RECIPE_LIST
from paragan.config.run import Run
from paragan.config.validate import check_d_conditioning, validate
from paragan.core.schema import from_dict, to_dict
from paragan.nets import Spec
from paragan.nets.conditioning import resolve_d_conditioning
from paragan.recipes import RECIPES, describe_recipes, get_recipe
from paragan.recipes.published import DATASETS, published_recipes

CLASSES = {"cifar10": 10, "cifar100": 100, "tinyimagenet64": 200}


def spec(name: str) -> Spec:
    run = get_recipe(name)
    if name == "gat-latents":
        return Spec(32, 4, 1000, image_shape=(3, 256, 256))
    return Spec(run.data.resolution, run.data.channels, CLASSES.get(name.partition("-")[2], 1000))


@pytest.mark.parametrize("name", published_recipes())
def test_a_recipe_is_a_run_that_can_be_played(name):
    run = dataclasses.replace(get_recipe(name), data=dataclasses.replace(get_recipe(name).data, path="somewhere"))
    assert run.recipe == name
    assert from_dict(Run, to_dict(run)) == run
    validate(run, min(8, run.lanes))
    run.nets.check(spec(name))
    check_d_conditioning(run.objective, resolve_d_conditioning(run.nets, spec(name)))
    assert get_recipe(name).__class__ is Run
    assert RECIPES[name].__doc__


def test_the_list_that_the_command_prints_is_complete():
    """The list is a file, so that the command need not import torch.

    To write it: python -c 'import paragan.recipes as r; print(r.describe_recipes(), end="")' > FILE
    """
    assert RECIPE_LIST.read_text() == describe_recipes()


def test_every_family_exists_for_every_set():
    families = ("sngan", "sagan", "biggan", "contragan", "r3gan", "stylegan2", "gat")
    expected = {f"{family}-{data}" for family in families for data in DATASETS}
    expected |= {f"{family}{size}" for family in ("biggan-imagenet", "stylegan2-") for size in (256, 512, 1024)}
    expected |= {"gat-tiny-cifar10", "gat-latents"}
    assert set(published_recipes()) == expected


def test_what_was_published():
    """PyTorch-StudioGAN, src/configs: CIFAR10/BigGAN-Mod, Tiny_ImageNet/SAGAN, ImageNet/BigGAN-Mod2048."""
    small, middle, large = (
        get_recipe(f"{name}") for name in ("biggan-cifar10", "sagan-tinyimagenet64", "biggan-imagenet128")
    )
    assert (small.batch, small.d_steps, small.kimg) == (64, 5, 32_000)
    assert (small.g.optimizer.lr, small.d.optimizer.lr, small.g.optimizer.betas) == (2e-4, 2e-4, (0.5, 0.999))
    assert (middle.batch, middle.d_steps, middle.g.optimizer.lr, middle.d.optimizer.lr) == (256, 1, 1e-4, 4e-4)
    assert (large.batch, large.d_steps, large.g.optimizer.lr, large.d.optimizer.lr) == (2048, 2, 5e-5, 2e-4)
    assert large.ema.half_life_kimg == pytest.approx(6931.1 * 4.096, rel=1e-3)  # 0.9999 a step of 2 x 2,048


def test_stylegan2_with_lazy_regularization():
    """Karras et al. 2020 (ADA), table of settings; StyleGAN2, appendix B: rates and betas for lazy penalties."""
    small, large = get_recipe("stylegan2-cifar10"), get_recipe("stylegan2-1024")
    assert (small.objective.r1, small.objective.path_length, small.nets.style_mixing) == (0.01, 0, 0)
    assert (small.batch, small.g.optimizer.lr, small.kimg) == (64, 2.5e-3, 100_000)
    assert small.d.optimizer.lr == pytest.approx(2.5e-3 * 16 / 17)
    assert (large.objective.r1, large.objective.path_length, large.objective.path_length_every) == (2, 2, 4)
    assert large.g.optimizer.lr == pytest.approx(2e-3 * 4 / 5)
    assert large.g.optimizer.betas == pytest.approx((0, 0.99 ** (4 / 5)))
    assert large.d.optimizer.betas == pytest.approx((0, 0.99 ** (16 / 17)))


def test_rates_of_gat_follow_width_and_batch():
    """Hyun et al. 2025: 2e-4 for a width of 768 and 512 images, inversely proportional to the width."""
    small, tiny = get_recipe("gat-cifar10"), get_recipe("gat-tiny-cifar10")
    assert (small.nets.width, small.batch, small.g.optimizer.lr, small.d.optimizer.lr) == (384, 512, 4e-4, 4e-4)
    assert tiny.g.optimizer.lr == pytest.approx(2e-4 * 768 / 128 * (64 / 512) ** 0.5, rel=1e-2)
    assert (small.g.optimizer.betas, small.g.max_norm, small.objective.r1) == ((0, 0.99), 1, 0.1)


def test_latents_have_no_colours_and_are_not_flipped():
    run = get_recipe("gat-latents")
    assert run.objective.augment.policy == ("translation", "cutout")
    assert not run.data.mirror
    assert (run.data.resolution, run.data.channels) == (0, 0)
    assert run.nets == get_recipe("gat-cifar10").nets


PARAMETERS = {  # G and D together: StudioGAN's figures for CIFAR-10, ParaGAN's Table 1 for ImageNet
    "sngan-cifar10": 4_304_387 + 1_055_105,
    "biggan-cifar10": 9_416_196 + 2_415_170,
    "sngan-imagenet128": 81_440_068,
    "sagan-imagenet128": 81_465_670,
    "biggan-imagenet128": 158_416_358,
    "contragan-imagenet128": 160_777_190,
}


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("name", PARAMETERS)
def test_networks_are_as_large_as_published(name):
    with torch.device("meta"):
        nets, of = get_recipe(name).nets, spec(name)
        pair = nets.generator(of), nets.discriminator(of)
    assert sum(p.numel() for net in pair for p in net.parameters()) == PARAMETERS[name]


def test_a_lane_of_biggan_holds_what_a_device_holds():
    for name, images in (("128", 32), ("256", 32), ("512", 16), ("1024", 8)):
        run = get_recipe(f"biggan-imagenet{name}")
        assert run.batch == 2048
        assert run.batch // run.lanes == images
