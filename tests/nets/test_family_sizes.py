"""Numbers of parameters of the families whose G gets data, as docs/networks.md states them."""

import pytest
import torch

from paragan.nets import HiFiGAN, Spec, SuperResolution, VQAutoencoder

IMAGES = Spec(32, 3)
WAVES = Spec(0, 0, array_shape=(1, 4096))


@pytest.mark.parametrize(
    ("config", "spec", "sizes"),
    [
        (VQAutoencoder(), IMAGES, (528_643, 167_649)),
        (HiFiGAN(), WAVES, (376_706, 2_648_584)),
        (SuperResolution(), IMAGES, (195_971, 167_649)),
    ],
)
def test_default_sizes(config, spec, sizes):
    with torch.device("meta"):
        nets = config.generator(spec), config.discriminator(spec)
    assert tuple(sum(p.numel() for p in net.parameters()) for net in nets) == sizes
