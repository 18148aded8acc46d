"""State the figures of docs/measurements/claims.md."""

from __future__ import annotations

from benchmarks.figures.registry import Page

PAGE = Page(
    "docs/measurements/claims.md",
    not_measured={
        "the code of their Figure 5 (a config": "a name",
        "more than 30 % throughput": "the paper's",
        "BigGAN from 15 days to 14 hours, 91 % scaling efficiency at 1,024 workers": "the paper's",
        "1024 x 1024 with BigGAN": "the paper's",
        "algorithm 2 for several wires": "a name",
        "a difference at 8 bits": "a setting",
        "weak scaling to 2,000 GPUs": "the paper's",
        "| 2,000 GPUs |": "the paper's",
        "hardly fewer steps with 8 workers than with 1": "settings",
        "CIFAR-100": "a name",
    },
)
