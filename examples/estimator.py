"""The Python interface of the ParaGAN paper (Fig. 5): `python examples/estimator.py [--steps N]`.

The same script trains on one process or on many: `torchrun --nproc-per-node 2 examples/estimator.py`.
"""

import argparse

import torch
from torch import nn

import paragan as pg


class Generator:
    latent = 32

    def __init__(self):
        self.embed = nn.Embedding(10, 32)
        self.net = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64), nn.Tanh()
        )

    def model_fn(self, latent_var, y):
        return self.net(torch.cat([latent_var, self.embed(y)], 1)).view(-1, 1, 8, 8)


class Discriminator:
    def __init__(self):
        self.embed = nn.Embedding(10, 32)
        self.net = nn.Sequential(
            nn.Linear(64 + 32, 256),
            nn.LeakyReLU(0.2),
            nn.Linear(256, 256),
            nn.LeakyReLU(0.2),
            nn.Linear(256, 1),
        )

    def model_fn(self, x, y):
        out_logit = self.net(torch.cat([x.flatten(1), self.embed(y)], 1)).squeeze(1)
        return out_logit.sigmoid(), out_logit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    torch.manual_seed(0)
    cfg = pg.Config(
        data=pg.DataOptions(path="digits"),
        max_steps=parser.parse_args().steps,
        base_bs=64,
        objective=pg.Adversarial(loss="nonsaturating", r1=0.1),
    )
    scale_mgr = pg.ScalingManager(config=cfg, bs=256, num_workers=8)
    gan = pg.Estimator(Generator(), Discriminator())
    for _step in cfg.max_steps:
        scale_mgr.train(gan)
    scale_mgr.eval(metric="fid")
    scale_mgr.close()


if __name__ == "__main__":
    main()
