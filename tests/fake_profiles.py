"""A profile and a run for tests of plans, made by hand."""

import dataclasses

from paragan.plan.profile.profile import Device, Memory, Noise, Profile, Turn
from paragan.recipes import recipe


def turn(batch, seconds):
    return Turn(batch, tuple(seconds * (0.4 + 0.5 * (i + 1) / 16) for i in range(16)), 0.9 * seconds, seconds)


def profile(g_s=0.02, d_s=0.03, params=300_000, noise=None, memory=()):
    """Of so many seconds a turn of 16 images, in proportion beyond."""
    device = Device("cpu", "a processor", 1, "float32", 1e10, 8 << 30, "2", "0")
    return Profile(
        recipe="digits",
        network="x",
        device=device,
        params=(params, params),
        flops=1e6,
        g=(turn(16, g_s), turn(64, 4 * g_s)),
        d=(turn(16, d_s), turn(64, 4 * d_s)),
        noise={"G": Noise(noise, noise / 2, 2 * noise), "D": Noise(2 * noise, noise, 4 * noise)} if noise else {},
        memory=tuple(Memory(batch, nbytes) for batch, nbytes in memory),
    )


def run(batch=64, lanes=8):
    found = recipe("digits")
    data = dataclasses.replace(found.data, resolution=8, channels=1)
    device = dataclasses.replace(found.device, precision="float32")
    return dataclasses.replace(found, data=data, device=device, lanes=lanes, batch=batch)
