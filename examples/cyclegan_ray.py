"""The networks of `examples/cyclegan.py` under Ray Train, with workers that Ray starts.

    python -m examples.cyclegan_ray --ranks 2

TorchTrainer forms the process group of its workers. What a user of it changes:

    -g_ab, g_ba, d_a, d_b = (ray.train.torch.prepare_model(net) for net in (g_ab, g_ba, d_a, d_b))
    -loader = ray.train.torch.prepare_data_loader(loader)
    +gen, disc = pg.Replica([g_ab, g_ba], opt_g), pg.Replica([d_a, d_b], opt_d)
    +loader = DataLoader(images, batch, sampler=pg.shard(images))
    -set_requires_grad([d_a, d_b], False)
    -opt_g.zero_grad()
    -loss.backward()
    -opt_g.step()
    -set_requires_grad([d_a, d_b], True)
    +with gen.turn():
    +    loss.backward()
"""

import argparse
import sys
from itertools import chain, repeat

import torch
from torch.utils.data import DataLoader

import paragan as pg
from examples import cyclegan

try:
    import ray.train
    from ray.train.torch import TorchTrainer
except ImportError:
    sys.exit('This example needs Ray Train. Use: pip install "ray[train]"')


def train(options: argparse.Namespace) -> float:
    """Train as one of the workers. Returns the cycle error."""
    torch.manual_seed(0)
    world = pg.join(device=ray.train.torch.get_device())
    g_ab, g_ba, d_a, d_b = networks = cyclegan.make_networks().to(world.device)
    opt_g, opt_d = cyclegan.make_optimizers(networks)
    gen = pg.Replica([g_ab, g_ba], opt_g, wire=options.wire, ema=0.98)
    disc = pg.Replica([d_a, d_b], opt_d, wire=options.wire)
    images = cyclegan.load_images(options, world.device)
    loader = DataLoader(images, options.batch // world.size, sampler=pg.shard(images))
    for step, (a, b) in zip(range(1, options.steps + 1), chain.from_iterable(repeat(loader))):
        with gen.turn():
            loss, fake_a, fake_b = cyclegan.generator_loss(networks, a, b)
            loss.backward()
        with disc.turn(backwards=2):
            cyclegan.discriminator_loss(d_a, a, fake_a).backward()
            cyclegan.discriminator_loss(d_b, b, fake_b).backward()
        pg.check_replicas(gen, disc, every=10)
        if step % 100 == 0:
            ray.train.report({"step": step, "loss of G": loss.item()})
    with gen.using_ema(), torch.no_grad():
        return cyclegan.cycle_error(networks, images)


def main(options: argparse.Namespace) -> None:
    workers = ray.train.ScalingConfig(num_workers=options.ranks, use_gpu=False)
    error = TorchTrainer(train, train_loop_config=options, scaling_config=workers).fit().return_value
    print(f"step {options.steps}: cycle error {error:.4f} of 255")


if __name__ == "__main__":
    parser = cyclegan.make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    main(parser.parse_args())
