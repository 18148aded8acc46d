"""The networks of `examples/cyclegan.py` under accelerate's launcher.

    accelerate launch --cpu --num_processes 2 -m examples.cyclegan_accelerate

accelerate starts the ranks, forms their process group and divides the batches; networks and optimizers are not given to
`prepare`, which would wrap each network in DistributedDataParallel. What a user of it changes:

    -g_ab, g_ba, d_a, d_b, opt_g, opt_d, loader = accelerator.prepare(g_ab, g_ba, d_a, d_b, opt_g, opt_d, loader)
    +loader = accelerator.prepare(loader)
    +gen, disc = pg.Replica([g_ab, g_ba], opt_g), pg.Replica([d_a, d_b], opt_d)
    -set_requires_grad([d_a, d_b], False)
    -opt_g.zero_grad()
    -accelerator.backward(loss)
    -opt_g.step()
    -set_requires_grad([d_a, d_b], True)
    +with gen.turn(scaler=accelerator.scaler):     # not None with --mixed_precision fp16; then update it in each step
    +    accelerator.backward(loss)
"""

import argparse
import sys
from itertools import chain, repeat

import torch
from torch.utils.data import DataLoader

import paragan as pg
from examples import cyclegan

try:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed
except ImportError:
    sys.exit("This example needs accelerate. Use: pip install accelerate")


def main(options: argparse.Namespace) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    pg.join(device=accelerator.device)
    g_ab, g_ba, d_a, d_b = networks = cyclegan.make_networks().to(accelerator.device)
    opt_g, opt_d = cyclegan.make_optimizers(networks)
    gen = pg.Replica([g_ab, g_ba], opt_g, wire=options.wire, ema=0.98)
    disc = pg.Replica([d_a, d_b], opt_d, wire=options.wire)
    images = cyclegan.load_images(options, accelerator.device)
    loader = accelerator.prepare(DataLoader(images, options.batch, shuffle=True))
    loss = torch.zeros(())
    for _step, (a, b) in zip(range(options.steps), chain.from_iterable(repeat(loader))):
        with gen.turn(scaler=accelerator.scaler):
            with accelerator.autocast():
                loss, fake_a, fake_b = cyclegan.generator_loss(networks, a, b)
            accelerator.backward(loss)
        with disc.turn(scaler=accelerator.scaler):
            with accelerator.autocast():
                loss_d = cyclegan.discriminator_loss(d_a, a, fake_a) + cyclegan.discriminator_loss(d_b, b, fake_b)
            accelerator.backward(loss_d)
        if accelerator.scaler is not None:
            accelerator.scaler.update()
        pg.check_replicas(gen, disc, every=10)
    loss = accelerator.reduce(loss, "mean")
    with gen.using_ema(), torch.no_grad():
        error = cyclegan.cycle_error(networks, images)
    accelerator.print(f"step {options.steps}: loss of G {loss:.4f}, cycle error {error:.4f} of 255")
    accelerator.end_training()


if __name__ == "__main__":
    set_seed(0)
    main(cyclegan.make_parser(__doc__).parse_args())
