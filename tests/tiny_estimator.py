"""Small networks of the user's own for tests: `model_fn` objects as in the paper, and plain modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import paragan as pg


class Generator:
    latent = 8

    def __init__(self):
        self.layers = [nn.Linear(18, 32), nn.Linear(32, 64)]

    def model_fn(self, latent_var, y):
        h = self.layers[0](torch.cat([latent_var, nn.functional.one_hot(y, 10).float()], 1)).relu()
        return self.layers[1](h).tanh().view(-1, 1, 8, 8)


class Discriminator:
    def __init__(self):
        self.net = nn.Linear(74, 1)

    def model_fn(self, x, y):
        out_logit = self.net(torch.cat([x.flatten(1), nn.functional.one_hot(y, 10).float()], 1))
        return out_logit.sigmoid(), out_logit


class PlainG(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.norm = nn.Linear(8, 64), nn.BatchNorm2d(1)

    def forward(self, z, y):
        return self.norm(self.net(z).view(-1, 1, 8, 8)).tanh()


class PlainD(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 1)

    def forward(self, x, y):
        return self.net(x.flatten(1)).squeeze(1)


def config(**fields):
    return pg.Config(
        data=pg.DataOptions(path="digits"),
        max_steps=5,
        evaluation=pg.EvaluationOptions(metrics=("fd",), count=64),
        **fields,
    )


def make_manager(**fields):
    return pg.ScalingManager(config(latent=8, **fields), bs=32, num_workers=4)


def make_seeded(make):
    torch.manual_seed(0)
    return make()


def untyped(value: Any) -> Any:
    """Hide the type from the type checker, as in an unchecked script."""
    return value
