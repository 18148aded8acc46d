"""State the figures of docs/custom_code.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page("docs/custom_code.md")


@PAGE.states("examples")
def examples(result: Any) -> Iterator[Statement]:
    printed = {name: "\n".join(example["printed"]) for name, example in result["examples"].items()}
    seconds = {name: example["cpu_s"] for name, example in result["examples"].items()}

    def find(example: str, pattern: str) -> tuple[str, ...]:
        """Return the numbers that an example printed where the pattern has `#`."""
        match = re.search(re.escape(pattern).replace(r"\#", r"([-\d.,]+)").replace(r"\ ", r"\s+"), printed[example])
        assert match, f"{example} printed no {pattern}"
        return match.groups()

    covered = "# of # modes covered, #% of points"
    text = "Ring: {} of {} modes covered, {} % of the points within three standard deviations of a mode, {:.0f} s."
    yield text, *find("mixture ring", covered), seconds["mixture ring"]
    text = "Square: {} of {}, {} % (points between neighboring modes remain), {:.0f} s."
    yield text, *find("mixture square", covered), seconds["mixture square"]
    yield "In the depth profile, {} % of the energy is in other layers", *find("showers", "profile: #% of the energy")
    distances = (find("showers", f"{name} # +- # # +- # #") for name in ("depth", "radius", "energy"))
    depth, radius, (real, _, fake, _, energy) = distances
    text = "mean depth {}, radius {}, energy {} ({} GeV instead of {}: the largest error)"
    yield text, depth[-1], radius[-1], energy, fake, real
    photons, electrons = (find("showers", f"depth of {kind}s: # cells real, # fake") for kind in ("photon", "electron"))
    text = "The mean depth of photons is {} cells, of electrons {} (real: {} and {}). {:.0f} s."
    yield text, photons[1], electrons[1], photons[0], electrons[0], seconds["showers"]
    text = "PSNR {} dB, fd_pixels {} on the 1,797 digits, {} tokens in use. {:.0f} s."
    found = (find("tokenizer", pattern)[0] for pattern in ("PSNR # dB", "done: fd_pixels #", "# of 625 tokens in use"))
    yield text, *found, seconds["tokenizer"]
