"""The plain loops of the benchmark have the networks that paragan trains, and both train."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks.lib.plain_families import augment_plainly, max_output_difference
from benchmarks.lib.session_fixture import make_session, random_dataset
from benchmarks.speed.families import FAMILIES, main, make_run
from paragan.train.loop import play_round

SMALL = ("batch=8", "lanes=2")
SMALL_UNET = ("nets.widths=[8,8]", "nets.blocks=1")
SETTINGS = {
    "stylegan2": ("nets.channel_base=256", "nets.channel_max=16", "nets.latent=8", "nets.style=8"),
    "gat": ("nets.width=16", "nets.heads=2"),
    "diffusion": (*SMALL_UNET, "g.warm_up_kimg=0"),
    "distill": (*SMALL_UNET, "d_steps=2"),
    "features": ("nets.width=8", "nets.d_width=8", "d_features.width=8", "d_steps=2"),
}
DATA = random_dataset(32, 3, 16)


def make_small_run(name: str):
    return make_run(FAMILIES[name], DATA, *SMALL, *SETTINGS[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_agree(name: str):
    assert max_output_difference(make_small_run(name), DATA) < 1e-4


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("name", FAMILIES)
def test_both_train(name: str):
    """Parameters move and are finite, which they are not after a loss that is none."""
    run = make_small_run(name)
    plain, session = FAMILIES[name].plain(run, DATA), make_session(run, DATA)
    players = dict(zip("GD", session.game.players))
    networks = {"plain G": plain.g, "paragan G": players["G"].net}
    if plain.trains_d:
        networks |= {"plain D": plain.d, "paragan D": players["D"].net}
    before = {who: parameters_of(net) for who, net in networks.items()}
    for _ in range(4):  # blocks that start at 0 give no gradient to what is before them
        plain.step()
        play_round(session)
    for who, net in networks.items():
        after = parameters_of(net)
        assert after.isfinite().all(), who
        assert (after != before[who]).float().mean() > 0.9, who
    for who in "GD" if plain.trains_d else "G":
        assert before[f"plain {who}"].numel() == before[f"paragan {who}"].numel()


def parameters_of(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_levels_of_an_image_have_the_same_augmentation():
    torch.manual_seed(0)
    levels = augment_plainly(torch.full((64, 4, 3, 32, 32), 100.0))
    assert torch.equal(levels, levels[:, :1].expand_as(levels))
    is_empty = levels[:, 0, 0] == 0
    assert 0.15 < is_empty.float().mean() < 0.4  # a square of half the side, in part outside, and what was shifted in
    assert (levels[:, 0, 0][~is_empty] > 90).all()


@pytest.mark.slow
def test_the_benchmark_writes_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small = dataclasses.replace(FAMILIES["stylegan2"], settings=(*SMALL, *SETTINGS["stylegan2"]), period=2)
    monkeypatch.setitem(FAMILIES, "stylegan2", small)
    file = tmp_path / "families.json"
    main(["--families=stylegan2", "--rounds=2", "--seconds=0.01", f"--json={file}"])
    result = json.loads(file.read_text("utf-8"))["families"]["stylegan2"]
    assert result["plain/paragan"]["median"] > 0
    assert result["batch"] == 8
    with pytest.raises(SystemExit, match="2"):
        main(["--families=stylegan9"])
