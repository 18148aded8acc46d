"""A profile and a run for tests of plans, made by hand."""

import dataclasses

from paragan.plan.profile.profile import DeviceInfo, MemoryUse, NoiseScale, Profile, TurnProfile
from paragan.recipes import get_recipe


def make_turn_profile(batch, seconds):
    return TurnProfile(batch, tuple(seconds * (0.4 + 0.5 * (i + 1) / 16) for i in range(16)), 0.9 * seconds, seconds)


def make_profile(g_s=0.02, d_s=0.03, params=300_000, noise=None, memory=()):
    """Of so many seconds a turn of 16 images, in proportion beyond."""
    device = DeviceInfo("cpu", "a processor", 1, "float32", 1e10, 8 << 30, "2", "0")
    return Profile(
        recipe="digits",
        network_digest="x",
        device=device,
        num_params=(params, params),
        flops_per_image=1e6,
        g=(make_turn_profile(16, g_s), make_turn_profile(64, 4 * g_s)),
        d=(make_turn_profile(16, d_s), make_turn_profile(64, 4 * d_s)),
        noise_scale={"G": NoiseScale(noise, noise / 2, 2 * noise), "D": NoiseScale(2 * noise, noise, 4 * noise)}
        if noise
        else {},
        memory=tuple(MemoryUse(batch, nbytes) for batch, nbytes in memory),
    )


def make_run(batch=64, lanes=8):
    result = get_recipe("digits")
    data = dataclasses.replace(result.data, resolution=8, channels=1)
    device = dataclasses.replace(result.device, precision="float32")
    return dataclasses.replace(result, data=data, device=device, lanes=lanes, batch=batch)
