"""Every network is one graph under torch.compile.

After a graph break torch would compile block by block, and run eagerly once it reaches its recompilation limit.
"""

import pytest
import torch

from paragan.nets import DCGAN, GAT, R3GAN, SAGAN, SNGAN, BigGAN, BigGANDeep, ContraGAN, Spec, StyleGAN2
from paragan.nets.spectral_norm import train_mode

FAMILIES = {
    "dcgan": DCGAN(width=8, latent=8),
    "r3gan": R3GAN(width=16),
    "stylegan2": StyleGAN2(channel_base=256, latent=16, style=16),
    "gat": GAT(width=16, depth=4, heads=2, latent=8),
    "sngan": SNGAN(width=8, latent=8),
    "sagan": SAGAN(width=8, latent=8, attention=8),
    "biggan": BigGAN(width=4, latent=8, attention=16),
    "biggan again": BigGAN(width=4, latent=8, attention=16, checkpointing=True),
    "biggan-deep": BigGANDeep(width=16, latent=8, attention=8),
    "contragan": ContraGAN(width=4, latent=8),
}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_network_compiles_to_one_graph(family):
    y = torch.arange(4)
    for make, x in (
        (family.generator, torch.rand(4, family.latent)),
        (family.discriminator, torch.rand(4, 3, 32, 32)),
    ):
        torch.compiler.reset()
        explanation = torch._dynamo.explain(train_mode(make(Spec(32, 3, 4))))(x, y)  # pyright: ignore
        assert (explanation.graph_count, explanation.graph_break_count) == (1, 0), explanation.break_reasons
