"""Backbones: shapes at every resolution, gradients of all parameters, published sizes, exact rewrites."""

import dataclasses
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import cached
from torch.utils.flop_counter import FlopCounterMode

from advice import advises
from paragan.core.errors import UsageError
from paragan.core.types import DiscriminatorOutput
from paragan.nets import DCGAN, SAGAN, SNGAN, BigGAN, BigGANDeep, ContraGAN, Nets, Spec
from paragan.nets.attention import SelfAttention
from paragan.nets.lane_batch_norm import LaneBatchNorm
from paragan.nets.resample import DownConv, UpConv
from paragan.nets.spectral_norm import train_mode

CONFIGS = {
    "dcgan": DCGAN(width=4, latent=6),
    "dcgan-bn": DCGAN(width=4, latent=6, spectral=False, batch_norm=True),
    "sngan": SNGAN(width=4, latent=6),
    "sngan-plain": SNGAN(width=2, d_width=4, latent=6, spectral=False),
    "sagan": SAGAN(width=4, d_width=8, latent=6),
    "biggan": BigGAN(width=4, d_width=8, latent=420, shared=5),  # a length that 4, 5, 6 and 7 chunks divide
    "biggan-deep": BigGANDeep(width=4, d_width=8, latent=6, shared=5),
    "contragan": ContraGAN(width=4, d_width=8, latent=420, shared=5, embedding=7),
}
CONDITIONED = {
    "dcgan-concat": DCGAN(width=4, g_conditioning="concat", d_conditioning="concat"),
    "dcgan-classifier": DCGAN(width=4, d_conditioning="classifier"),
    "sngan-concat": SNGAN(width=4, g_conditioning="concat", d_conditioning="concat"),
    "sngan-contrastive": SNGAN(width=4, d_conditioning="contrastive"),
    "sagan-concat": SAGAN(width=4, g_conditioning="concat", d_conditioning="concat"),
    "biggan-concat": BigGAN(width=4, g_conditioning="concat", d_conditioning="concat"),
    "biggan-classifier": BigGAN(width=4, d_conditioning="classifier"),
    "biggan-deep-concat": BigGANDeep(width=4, g_conditioning="concat", d_conditioning="concat"),
    "biggan-deep-contrastive": BigGANDeep(width=4, d_conditioning="contrastive"),
    "contragan-projection": ContraGAN(width=4, d_conditioning="projection"),
}
RESIDUAL = ("sngan", "sagan", "biggan", "biggan-deep", "contragan")


def least(config):
    """Return the lowest resolution that a family supports."""
    return 8 if config.name in ("dcgan", "sngan") else 32


def build(config, spec, seed=0):
    torch.manual_seed(seed)
    G, D = train_mode(config.generator(spec)), train_mode(config.discriminator(spec))
    for part in (*G.modules(), *D.modules()):
        if isinstance(part, SelfAttention):
            nn.init.ones_(part.gamma)  # with gamma = 0 attention would have no effect
    return G, D


def build_on_meta(config, spec):
    """Build networks on the meta device, without spectral norm, which has no parameters and is slow."""
    with torch.device("meta"):
        config = dataclasses.replace(config, spectral=False)
        return config.generator(spec), config.discriminator(spec)


def score(output):
    """Reduce all outputs of a discriminator to [N]."""
    if isinstance(output, Tensor):
        return output
    total = output.logits
    if output.class_logits is not None:
        total = total + output.class_logits.logsumexp(1)
    if output.embedding is not None:
        total = total + (output.embedding * output.proxies).sum(1)
    return total


def count(net):
    return sum(parameter.numel() for parameter in net.parameters())


def batch(G, spec, n=4):
    y = torch.arange(n) % spec.classes if spec.classes else None
    return torch.randn(n, G.latent), y


@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize(
    ("name", "resolution"),
    [
        pytest.param(name, size, marks=[pytest.mark.slow] if size == 64 else [])
        for name in CONFIGS
        for size in (8, 16, 32, 64)
        if size >= least(CONFIGS[name])
    ],
)
def test_shapes_and_gradients(name, resolution, classes):
    spec = Spec(resolution, 3, classes)
    G, D = build(CONFIGS[name], spec)
    z, y = batch(G, spec, 32)  # enough images that every unit is active for one
    fake = G(z, y)
    assert G.latent == CONFIGS[name].latent
    assert fake.shape == (32, 3, resolution, resolution)
    assert fake.dtype == torch.float32
    assert fake.abs().max() <= 1
    logits = score(D(fake, y))
    assert logits.shape == (32,)
    (logits * torch.randn(32)).sum().backward()
    for net in (G, D):
        for key, parameter in net.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all()
    assert all(parameter.grad.any() for parameter in G.parameters())


@pytest.mark.slow(after=8)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("resolution", [128, 256])
def test_larger_resolutions_build(name, resolution):
    spec = Spec(resolution, 1)
    G, D = build(CONFIGS[name], spec)
    with torch.no_grad():
        assert D(G(torch.randn(2, G.latent))).shape == (2,)


@pytest.mark.parametrize("name", CONFIGS)
def test_labels_are_ignored_without_classes_and_required_otherwise(name):
    size = least(CONFIGS[name])
    G, D = build(CONFIGS[name], Spec(size, 1))
    z, y = torch.randn(4, G.latent), torch.arange(4)
    assert torch.equal(G(z, y), G(z, None))
    assert torch.equal(D(G(z), y), D(G(z), None))
    G, D = build(CONFIGS[name], Spec(size, 1, classes=4))
    with torch.no_grad():
        for norm in (part for part in G.modules() if isinstance(part, nn.Embedding)):
            norm.weight.normal_()
    assert not torch.equal(G(z, y), G(z, y.flip(0)))
    assert not torch.equal(score(D(G(z, y), y)), score(D(G(z, y), y.flip(0))))
    for wrong in (lambda: G(z, None), lambda: D(torch.randn(4, 1, size, size), None)):
        with pytest.raises(UsageError, match=r"y=None: .*int64"):
            wrong()


@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_channels_last_is_preserved(name, classes):
    spec = Spec(max(16, least(CONFIGS[name])), 3, classes)
    G, D = build(CONFIGS[name], spec)
    z, y = batch(G, spec)
    expected = G(z, y), score(D(G(z, y), y))
    outputs = []
    for net in (G, D):
        net.to(memory_format=torch.channels_last)
        for part in net.modules():
            if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
                part.register_forward_hook(lambda part, _, out: outputs.append(out))
    fake = G(z, y)
    logits = score(D(fake, y))
    for out in (fake, *outputs):
        assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close((fake, logits), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.slow(after=8)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("classes", [3, 0])
def test_bf16_autocast(name, classes):
    spec = Spec(least(CONFIGS[name]), 3, classes)
    G, D = build(CONFIGS[name], spec)
    z, y = batch(G, spec)
    with torch.autocast("cpu", torch.bfloat16):
        fake = G(z, y)
        logits = score(D(fake, y))
        loss = F.softplus(logits).mean()
    assert fake.dtype == logits.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in (*G.parameters(), *D.parameters()))


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_penalty_matches_finite_differences(name):
    size = least(CONFIGS[name])
    _, D = build(CONFIGS[name], Spec(size, 2, classes=3))
    D.double()
    x, y = torch.randn(4, 2, size, size, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1, 2, 0])

    def penalty():
        (slope,) = torch.autograd.grad(score(D(x, y)).sum(), x, create_graph=True)
        return slope.square().sum((1, 2, 3)).mean()

    parameters = list(D.parameters())
    grads = torch.autograd.grad(penalty(), parameters, allow_unused=True)
    direction = [torch.randn_like(parameter) for parameter in parameters]
    exact = sum((g * w).sum() for g, w in zip(grads, direction) if g is not None)

    def penalty_at(by):
        with torch.no_grad():
            torch._foreach_add_(parameters, direction, alpha=by)
        value = penalty().detach()
        with torch.no_grad():
            torch._foreach_add_(parameters, direction, alpha=-by)
        return value

    torch.testing.assert_close((penalty_at(1e-7) - penalty_at(-1e-7)) / 2e-7, exact, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_lanes_equal_separate_lanes(name):
    spec = Spec(least(CONFIGS[name]), 1, classes=3)
    G, D = build(CONFIGS[name], spec)
    z, y = batch(G, spec, 8)
    for net in (G, D):
        for part in net.modules():
            if isinstance(part, LaneBatchNorm):
                part.lane_batch = 4
    fake = torch.cat([G(a, b) for a, b in zip(z.split(4), y.split(4))])
    torch.testing.assert_close(G(z, y), fake)
    logits = torch.cat([score(D(a, b)) for a, b in zip(fake.split(4), y.split(4))])
    torch.testing.assert_close(score(D(fake, y)), logits)


def test_sngan_has_the_published_sizes_on_cifar10():
    """G and D: without classes 4.28 M and 1.05 M (mimicry); with ten 4.30 M and 1.06 M (StudioGAN)."""
    sizes = [[count(net) for net in build(SNGAN(width=256), Spec(32, 3, classes))] for classes in (0, 10)]
    assert sizes == [[4_276_739, 1_053_825], [4_304_387, 1_055_105]]


@pytest.mark.parametrize(
    ("config", "spec", "expected"),
    [
        # StudioGAN's BigGAN for CIFAR-10: 9.42 M and 2.42 M
        (BigGAN(latent=80), Spec(32, 3, 10), (9_416_196, 2_415_170)),
        # Table 1 of ParaGAN, ImageNet at 128 px, G + D: 81.44 M, 81.47 M, 158.42 M, 160.78 M
        (SNGAN(width=64, d_width=64, block_width="out"), Spec(128, 3, 1000), (41_996_931, 39_443_137)),
        (SAGAN(), Spec(128, 3, 1000), (42_017_412, 39_448_258)),
        (BigGAN(), Spec(128, 3, 1000), (70_433_988, 87_982_370)),  # BigGAN-PyTorch's too
        (ContraGAN(), Spec(128, 3, 1000), (70_433_988, 90_343_202)),
        (BigGANDeep(), Spec(128, 3, 1000), (50_244_484, 34_590_210)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_published_sizes(config, spec, expected):
    """All parameters of G and of D, on images of 3 channels; buffers are not counted."""
    assert tuple(count(net) for net in build_on_meta(config, spec)) == expected


def test_spectral_norm_has_no_parameters():
    for config in (CONFIGS["biggan"], CONFIGS["sagan"]):
        plain = dataclasses.replace(config, spectral=False)
        sizes = [[count(net) for net in build(c, Spec(32, 3, 2))] for c in (config, plain)]
        assert sizes[0] == sizes[1]


def test_biggan_at_1024_px():
    """Check channels and shapes of every block on the meta device."""
    G, D = build_on_meta(BigGAN(latent=180), Spec(1024, 3, 10))
    rises = [(part.conv1.in_channels, part.conv1.out_channels) for part in blocks(G)]
    falls = [(part.conv1.in_channels, part.conv2.out_channels) for part in blocks(D)]
    widths = [1536, 1536, 768, 768, 384, 192, 96, 96, 96]
    assert rises == list(itertools.pairwise(widths))
    widths = [3, 96, 96, 96, 192, 384, 768, 768, 1536, 1536]
    assert falls == list(itertools.pairwise(widths))
    y = torch.zeros(2, dtype=torch.int64, device="meta")
    fake = G(torch.empty(2, 180, device="meta"), y)
    assert fake.shape == (2, 3, 1024, 1024)
    assert D(fake, y).shape == (2,)


def blocks(net):
    """Return the blocks without the wrapper that adds attention."""
    return [getattr(block, "block", block) for block in net.blocks]


@pytest.mark.parametrize(
    ("config", "products", "memory"),
    [
        (SAGAN(), (9.51, 6.04, 4.88, 3.10), (50.3, 7.81, 16.1, 2.20)),
        (BigGAN(), (21.1, 13.3, 10.8, 6.84), (75.4, 11.7, 24.1, 3.20)),
        (BigGANDeep(), (8.96, 7.53, 9.21, 9.21), (145.5, 23.3, 88.1, 23.5)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_savings_of_fused_resampling_and_checkpointing(config, products, memory):
    """Compare 1e9 products per image and MiB saved for backward: G as published, G, D as published, D."""
    spec = Spec(128, 3, 1000)
    measured = [num_products(dataclasses.replace(config, fused_resampling=enabled), spec) for enabled in (False, True)]
    assert [x for pair in zip(*measured) for x in pair] == pytest.approx(products, rel=0.01)
    measured = [
        saved_bytes_of_config(dataclasses.replace(config, checkpointing=enabled), spec) for enabled in (False, True)
    ]
    assert [x for pair in zip(*measured) for x in pair] == pytest.approx(memory, rel=0.01)


def passes(config, spec, n):
    """Return both networks, each with its forward pass on n images, on the meta device."""
    G, D = build_on_meta(config, spec)
    with torch.device("meta"):
        z, y = torch.empty(n, G.latent), torch.zeros(n, dtype=torch.int64)
        x = torch.empty(n, spec.channels, spec.resolution, spec.resolution)
    return [(G, lambda: G(z, y)), (D, lambda: D(x, y))]


def num_products(config, spec):
    for_each = []
    for _, forward in passes(config, spec, 1):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            forward()
        for_each.append(counter.get_total_flops() / 2e9)
    return for_each


def saved_bytes_of_config(config, spec):
    """Return the saved bytes that grow with the batch."""
    few, many = ([saved_bytes(net, forward) for net, forward in passes(config, spec, n)] for n in (2, 4))
    return [(more - less) / 2 / 2**20 for less, more in zip(few, many)]


def saved_bytes(net, forward):
    """Return the bytes that autograd saves in a forward pass, without parameters."""
    storages = []  # referenced, so that no address is used twice
    with saved_tensors_hooks(lambda x: storages.append(x.untyped_storage()) or x, lambda x: x):
        forward()
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    for parameter in net.parameters():
        sizes.pop(parameter.untyped_storage()._cdata, None)
    return sum(sizes.values())


def test_dcgan_has_radfords_layers_at_64():
    """The original (latent 100, width 64) has 3,576,704 and 2,765,568; its 4x4 convolutions are linear layers here."""
    G, D = build(DCGAN(latent=100, spectral=False, batch_norm=True), Spec(64, 3))
    assert count(G) == 3_576_704 + 3  # a bias at the image
    assert count(D) == 2_765_568 + 64 + 1  # biases of the first and of the last layer


def test_initial_weights():
    G, _ = build(DCGAN(), Spec(16, 3))
    assert G.ups[1].weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert G.norms[0].weight.mean().item() == pytest.approx(1, abs=0.01)
    G, _ = build(SNGAN(width=32), Spec(16, 3))
    block = G.blocks[0]
    bound = (6 / (2 * 32 * 9)) ** 0.5
    assert block.conv2.weight.abs().max().item() == pytest.approx(bound * 2**0.5, rel=0.01)
    assert block.shortcut.weight.abs().max().item() == pytest.approx((6 / 64) ** 0.5, rel=0.01)
    assert not block.conv1.bias.any()


def test_fused_convolution_equals_the_two_operations():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    up = UpConv(3, 4, 3, padding=1).double()
    down = DownConv(3, 4, 3, padding=1).double()
    large = F.interpolate(x, scale_factor=2.0, mode="nearest")
    torch.testing.assert_close(up(x), F.conv2d(large, up.weight, up.bias, padding=1))
    torch.testing.assert_close(down(x), F.avg_pool2d(F.conv2d(x, down.weight, down.bias, padding=1), 2))


@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize("name", RESIDUAL)
def test_fused_resampling_changes_no_output(name, classes):
    spec = Spec(32, 3, classes)
    results = []
    for fused in (True, False):
        G, D = build(dataclasses.replace(CONFIGS[name], fused_resampling=fused), spec)
        G.double(), D.double()
        torch.manual_seed(1)
        z, y = batch(G, spec)
        fake = G(z.double(), y)
        output = score(D(fake, y))
        output.square().sum().backward()
        named = (*G.named_parameters(), *D.named_parameters())
        results.append({"fake": fake, "verdict": output, **{f"{key} {i}": p.grad for i, (key, p) in enumerate(named)}})
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("name", RESIDUAL)
def test_checkpointing_changes_only_memory(name):
    """Gradients, moments and penalties are equal bit for bit; less than half of the memory is saved between passes."""
    spec = Spec(32, 3, classes=3)
    results, saved_bytes = [], []
    for checkpointing in (False, True):
        G, D = build(dataclasses.replace(CONFIGS[name], checkpointing=checkpointing), spec)
        norms = [part for part in G.modules() if isinstance(part, LaneBatchNorm)]
        torch.manual_seed(1)
        z, y = batch(G, spec, 8)
        sizes = {}

        def record_size(x, sizes=sizes):
            sizes[x.data_ptr()] = x.nbytes
            return x

        for norm in norms:
            norm.tracking, norm.lane_batch = True, 4
        with saved_tensors_hooks(record_size, lambda x: x):
            fake = G(z, y)
            output = score(D(fake, y))
        for norm in norms:
            norm.tracking = False  # as in a player's backward
        output.square().sum().backward()
        x = fake.detach().requires_grad_()
        (slope,) = torch.autograd.grad(score(D(x, y)).sum(), x, create_graph=True)
        slope.square().sum().backward()
        grads = [p.grad for p in (*G.parameters(), *D.parameters())]
        results.append([fake, output, slope, *grads, *(norm.moments for norm in norms)])
        saved_bytes.append(sum(sizes.values()))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert all(norm.moments[-1] == 2 for norm in norms)  # lanes, counted once
    assert saved_bytes[1] < saved_bytes[0] / 2


@pytest.mark.parametrize("name", RESIDUAL)
def test_checkpointing_under_cached_parametrizations(name):
    """As objectives call D. Gradients of the calls are summed in another order, so rounding differs."""
    spec = Spec(32, 3, classes=3)
    results = []
    for checkpointing in (False, True):
        _, D = build(dataclasses.replace(CONFIGS[name], checkpointing=checkpointing), spec)
        D.double()
        torch.manual_seed(1)
        x, y = torch.randn(2, 4, 3, 32, 32, dtype=torch.float64), torch.arange(4) % 3
        with cached():
            loss = (score(D(x[0], y)) - score(D(x[1], y))).square().sum()
        loss.backward()
        results.append([loss, *(p.grad for p in D.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", CONDITIONED)
def test_every_conditioning(name):
    config = CONDITIONED[name]
    spec = Spec(least(config), 3, classes=4)
    G, D = build(config, spec)
    z, y = batch(G, spec, 8)
    fake = G(z, y)
    output = D(fake, y)
    kind = config.d_conditioning
    assert isinstance(output, DiscriminatorOutput) == (
        kind in ("classifier", "contrastive") or config.name == "contragan" == kind
    )
    if config.g_conditioning == "concat":
        assert not torch.equal(fake, G(z, y.flip(0)))
    if kind != "classifier":
        assert not torch.equal(score(output), score(D(fake, y.flip(0))))
    score(output).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in D.parameters())
    assert all(p.grad is not None for p in G.parameters())
    for net in (G, D):
        net.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        assert score(D(G(z, y), y)).dtype == torch.float32
    torch.testing.assert_close(score(D(G(z, y), y)), score(output), rtol=1e-3, atol=1e-3)


def test_conditionings_that_do_not_fit_raise():
    labelled, plain = Spec(32, 3, 10), Spec(32, 3)
    for kind in (DCGAN, SNGAN, SAGAN, BigGAN, BigGANDeep, ContraGAN):
        for field, modes in (
            ("g_conditioning", ("concat", "batch_norm")),
            ("d_conditioning", ("concat", "projection")),
        ):
            for mode in modes:
                with pytest.raises(UsageError, match=f"nets.{field}={mode}: needs classes.*Use nets.{field}=auto"):
                    kind(**{field: mode}).check(plain)
                kind(**{field: mode}).check(labelled)
            with pytest.raises(UsageError, match=f"nets.{field}=none: the data has 10 .*--data.labels=false"):
                kind(**{field: "none"}).check(labelled)
            kind(**{field: "none"}).check(plain)


@pytest.mark.parametrize(
    ("config", "resolution", "line"),
    [
        (ContraGAN(latent=3), 32, "nets.latent=3: .*Use 4"),
        (BigGAN(attention=128), 128, "nets.attention=128: .*64 or 32 or 16 or 8"),
        (BigGANDeep(attention=4), 128, "nets.attention=4: "),
        (BigGAN(width=16, d_width=4), 128, "nets.d_width=4 leaves 4. Use nets.d_width=8"),
    ],
)
def test_sizes_that_do_not_fit_raise(config, resolution, line):
    for check in (config.check, config.generator, config.discriminator):
        with pytest.raises(UsageError, match=line):
            check(Spec(resolution, 3))


def test_latents_fit_as_advised():
    with advises("nets.latent=120: must be a multiple of 7 at 256 px, one chunk for each layer. Use 119 or 140"):
        BigGAN().check(Spec(256, 3))
    for latent in (119, 140):
        BigGAN(latent=latent).check(Spec(256, 3))


def test_attention_fits_as_advised():
    spec = Spec(64, 3)
    with advises(
        "nets.attention=24: must be 32 or 16 or 8 (short side of the maps, pixels) for images of 64 px, or 0 for none. "
        "Use 32"
    ):
        SAGAN(attention=24).check(spec)
    for side in (32, 16, 8, 0):
        SAGAN(attention=side).check(spec)
    with advises(
        "nets.attention=32: needs maps of at least 8 channels, and nets.width=2 leaves 4 and nets.d_width=2 leaves 2. "
        "Use nets.width=4 and nets.d_width=8, or nets.attention=0"
    ):
        SAGAN(width=2).check(spec)
    SAGAN(width=4, d_width=8).check(spec)
    SAGAN(width=2, attention=0).check(spec)


@pytest.mark.parametrize("config", [SAGAN(width=1), SAGAN(width=32, d_width=1), BigGAN(width=1, d_width=32)])
def test_widths_that_attention_needs_are_advised_at_once(config):
    spec = Spec(128, 3)
    with pytest.raises(UsageError) as caught:
        config.check(spec)
    wider = re.findall(r"nets\.(\w*width)=(\d+)", str(caught.value).partition("Use ")[2])
    dataclasses.replace(config, **{field: int(width) for field, width in wider}).check(spec)


def test_narrow_networks_without_attention():
    G, D = build(SAGAN(width=1, attention=0), Spec(64, 1))
    assert not any(isinstance(part, SelfAttention) for part in (*G.modules(), *D.modules()))


@pytest.mark.parametrize("config", [SAGAN(), BigGAN(), BigGANDeep(), ContraGAN()])
@pytest.mark.parametrize(
    ("wrong", "right"), [(16, "32"), (8, "32"), (50, "48 or 56"), (100, "96 or 112"), (2048, "1792")]
)
def test_families_of_3_to_8_halvings_name_the_limits(config, wrong, right):
    for check in (config.check, config.generator, config.discriminator):
        with pytest.raises(UsageError, match=f"resolution={wrong}: .*halve 3 to 8 times.*Use {right}$"):
            check(Spec(wrong, 3))


@pytest.mark.parametrize("config", [DCGAN(), SNGAN()])
@pytest.mark.parametrize(("wrong", "right"), [(4, "8"), (0, "8"), (25, "24 or 28"), (98, "96 or 112")])
def test_resolutions_that_do_not_fit_raise(config, wrong, right):
    for check in (config.check, config.generator, config.discriminator):
        with pytest.raises(UsageError, match=f"resolution={wrong}: .*. Use {right}"):
            check(Spec(wrong, 3))


def test_images_are_of_a_size_as_advised():
    with advises(
        "data.resolution=100: 100 x 100 can be halved 2 times, to 25 x 25; these networks halve 3 to 8 times, to sides "
        "of 4 to 32 pixels. Use 96 or 112"
    ):
        SAGAN().check(Spec(100, 3))
    for resolution in (96, 112):
        SAGAN().check(Spec(resolution, 3))


def test_configs_are_selected_by_name_and_reject_unknown_fields():
    nets = TypeAdapter(Nets)
    assert nets.validate_python({"name": "sngan", "width": 8, "d_width": 4}) == SNGAN(width=8, d_width=4)
    assert nets.validate_python({"name": "dcgan"}) == DCGAN()
    assert [nets.validate_python(name).name for name in RESIDUAL] == list(RESIDUAL)
    for wrong in ({"name": "dcgan", "d_width": 4}, {"name": "sngan", "width": 0}, {"name": "bigger"}):
        with pytest.raises(ValidationError):
            nets.validate_python(wrong)
