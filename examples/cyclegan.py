"""CycleGAN (Zhu et al. 2017): two generators, two discriminators, an optimizer for each pair.

    python -m examples.cyclegan                                      one process
    torchrun --nproc-per-node 2 -m examples.cyclegan                 two ranks, half of each batch on each
    python -m examples.cyclegan --data digits train.npz --size 16    any two data sets that `paragan data inspect` reads

Without --data, A is half of the handwritten digits, B the other half in blue ink on yellow paper. Changes from DDP:

    -dist.init_process_group()
    +pg.join()
    -g_ab, g_ba, d_a, d_b = (DistributedDataParallel(net) for net in (g_ab, g_ba, d_a, d_b))
    +gen, disc = pg.Replica([g_ab, g_ba], opt_g), pg.Replica([d_a, d_b], opt_d)
    -sampler = DistributedSampler(images)     # and sampler.set_epoch(epoch) in each epoch
    +sampler = pg.shard(images)
    -set_requires_grad([d_a, d_b], False)     # and True for the turn of the discriminators
    -opt_g.zero_grad()
    +with gen.turn():                         # around the forward pass too
         loss.backward()
    -opt_g.step()
"""

import argparse
from itertools import chain, repeat

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paragan as pg


def conv(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.LeakyReLU(0.2)]


def make_networks() -> nn.ModuleList:
    """Return G of A to B, G of B to A ([N, 3, H, W] to the same), D of A, D of B (to [N, 1, H/4, W/4])."""
    g = [nn.Sequential(*conv(3, 32), *conv(32, 32), nn.Conv2d(32, 3, 3, 1, 1), nn.Tanh()) for _ in "ab"]
    d = [nn.Sequential(*conv(3, 32, 2), *conv(32, 64, 2), nn.Conv2d(64, 1, 3, 1, 1)) for _ in "ab"]
    return nn.ModuleList([*g, *d])


def make_optimizers(networks: nn.ModuleList) -> list[torch.optim.Optimizer]:  # of both G, of both D
    return [torch.optim.Adam(pair.parameters(), 1e-3, betas=(0.5, 0.99)) for pair in (networks[:2], networks[2:])]


def generator_loss(networks: nn.ModuleList, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of both generators (least squares and cycle consistency), and their images in A and in B."""
    g_ab, g_ba, d_a, d_b = networks
    fake_b, fake_a = g_ab(a), g_ba(b)
    adversarial = (d_b(fake_b) - 1).square().mean() + (d_a(fake_a) - 1).square().mean()
    return adversarial + 10 * ((g_ba(fake_b) - a).abs().mean() + (g_ab(fake_a) - b).abs().mean()), fake_a, fake_b


def discriminator_loss(d: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return ((d(real) - 1).square().mean() + d(fake.detach()).square().mean()) / 2


def cycle_error(networks: nn.ModuleList, images: TensorDataset) -> float:
    """Return the mean difference of images and their double translation, in grey levels 0 to 255."""
    (g_ab, g_ba), (a, b) = networks[:2], images.tensors
    return 127.5 / 2 * float((g_ba(g_ab(a)) - a).abs().mean() + (g_ab(g_ba(b)) - b).abs().mean())


def load_images(options: argparse.Namespace, device: torch.device) -> TensorDataset:
    """Return images of A and of B, [N, 3, H, W] in -1..1; N is a number of whole batches."""
    if options.batch % pg.join().size:
        raise pg.UsageError(f"--batch {options.batch}: must divide by the ranks. Use a multiple of {pg.join().size}")
    data = [pg.load_data(path, resolution=options.size, channels=3, cache="memory") for path in options.data]
    a, b = (torch.from_numpy(x.images).to(device).permute(0, 3, 1, 2) / 127.5 - 1 for x in data)
    if options.data == ["digits", "digits"]:
        ink, paper = torch.tensor([[-0.8, -0.6, 0.4], [0.9, 0.8, 0.2]], device=device).view(2, 3, 1, 1)
        a, b = a[0::2], paper + (b[1::2] + 1) / 2 * (ink - paper)
    count = min(len(a), len(b)) // options.batch * options.batch
    return TensorDataset(a[:count], b[:count])


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs=2, default=["digits", "digits"], metavar=("A", "B"))
    parser.add_argument("--size", type=int, default=8, help="height and width of all images, pixels")
    parser.add_argument("--batch", type=int, default=32, help="images of A and of B in a step, of all ranks")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--wire", default="exact", help="of gradients: bf16, int8, int4, ...")
    return parser


def main(options: argparse.Namespace) -> None:
    world = pg.join()
    g_ab, g_ba, d_a, d_b = networks = make_networks().to(world.device)
    opt_g, opt_d = make_optimizers(networks)
    gen = pg.Replica([g_ab, g_ba], opt_g, wire=options.wire, ema=0.98)
    disc = pg.Replica([d_a, d_b], opt_d, wire=options.wire)
    start = ((options.folder and pg.load(options.folder, gen, disc)) or {"step": 0})["step"]
    images = load_images(options, world.device)
    sampler = pg.shard(images, position=start * options.batch)
    loader = DataLoader(images, options.batch // world.size, sampler=sampler)
    for step, (a, b) in zip(range(start + 1, options.steps + 1), chain.from_iterable(repeat(loader))):
        with gen.turn():
            loss, fake_a, fake_b = generator_loss(networks, a, b)
            loss.backward()
        with disc.turn(backwards=2):
            discriminator_loss(d_a, a, fake_a).backward()
            discriminator_loss(d_b, b, fake_b).backward()
        pg.check_replicas(gen, disc, every=10)
        if step % 100 == 0 or step == options.steps:
            with gen.using_ema(), torch.no_grad():
                error = cycle_error(networks, images)
            if world.is_main:
                print(f"step {step}: cycle error {error:.4f} of 255", flush=True)
            if options.folder:
                pg.save(options.folder, gen, disc, extra={"step": step})


if __name__ == "__main__":
    torch.manual_seed(0)
    parser = make_parser(__doc__)
    parser.add_argument("--folder", help="where the state is saved, every 100 steps; the same command resumes")
    main(parser.parse_args())
