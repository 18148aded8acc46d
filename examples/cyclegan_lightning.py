"""The networks of `examples/cyclegan.py` under Lightning 2, with manual optimization.

    python -m examples.cyclegan_lightning --ranks 2

Lightning starts the ranks and forms their process group. Its DDPStrategy wraps the whole LightningModule in one
DistributedDataParallel, which expects a gradient of every parameter in each backward pass, so a GAN fails
(Lightning#20866). What a user of it changes:

    +class OwnExchange(DDPStrategy):
    +    def configure_ddp(self):
    +        pass
    -trainer = L.Trainer(devices=2, strategy="ddp_find_unused_parameters_true")
    +trainer = L.Trainer(devices=2, strategy=OwnExchange(), use_distributed_sampler=False)
    +def on_train_start(self):
    +    opt_g, opt_d = self.optimizers()
    +    self.gen, self.disc = pg.Replica([g_ab, g_ba], opt_g), pg.Replica([d_a, d_b], opt_d)
    -self.toggle_optimizer(opt_g)
    -opt_g.zero_grad()
    -self.manual_backward(loss)
    -opt_g.step()
    -self.untoggle_optimizer(opt_g)
    +with self.gen.turn():
    +    self.manual_backward(loss)
"""

import argparse
import sys

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import paragan as pg
from examples import cyclegan

try:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    sys.exit("This example needs Lightning 2. Use: pip install lightning")


class OwnExchange(DDPStrategy):
    """Lightning's launcher and process group, without DistributedDataParallel."""

    def configure_ddp(self) -> None:
        pass


class CycleGAN(L.LightningModule):
    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.automatic_optimization = False
        self.options = options
        self.networks = cyclegan.make_networks()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return cyclegan.make_optimizers(self.networks)

    def train_dataloader(self) -> DataLoader:
        images = cyclegan.load_images(self.options, self.device)
        self.sampler = pg.shard(images)
        return DataLoader(images, self.options.batch // pg.join().size, sampler=self.sampler)

    def on_train_start(self) -> None:
        g_ab, g_ba, d_a, d_b = self.networks
        opt_g, opt_d = self.optimizers()
        self.gen = pg.Replica([g_ab, g_ba], opt_g, wire=self.options.wire, ema=0.98)
        self.disc = pg.Replica([d_a, d_b], opt_d, wire=self.options.wire)

    def on_train_epoch_start(self) -> None:
        self.sampler.position = self.current_epoch * self.sampler.epoch_samples  # also where Lightning resumes

    def training_step(self, batch: list[Tensor], _: int) -> None:
        a, b = batch
        _, _, d_a, d_b = self.networks
        with self.gen.turn():
            loss, fake_a, fake_b = cyclegan.generator_loss(self.networks, a, b)
            self.manual_backward(loss)
        with self.disc.turn(backwards=2):
            self.manual_backward(cyclegan.discriminator_loss(d_a, a, fake_a))
            self.manual_backward(cyclegan.discriminator_loss(d_b, b, fake_b))
        pg.check_replicas(self.gen, self.disc, every=10)
        self.log("loss_g", loss, sync_dist=True)  # mean over ranks


def main(options: argparse.Namespace) -> None:
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=OwnExchange(),
        use_distributed_sampler=False,  # pg.shard gives each rank its part
        max_steps=2 * options.steps,  # the steps of both optimizers count
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = CycleGAN(options)
    trainer.fit(model)
    if trainer.is_global_zero:
        with model.gen.using_ema(), torch.no_grad():
            error = cyclegan.cycle_error(model.networks, cyclegan.load_images(options, model.device))
        loss = trainer.callback_metrics["loss_g"]
        print(f"step {trainer.global_step // 2}: loss of G {loss:.4f}, cycle error {error:.4f} of 255")


if __name__ == "__main__":
    parser = cyclegan.make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    main(parser.parse_args())
