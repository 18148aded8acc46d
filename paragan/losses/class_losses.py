"""What D learns of labels beside judging, and G from it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from paragan.core.errors import UsageError
from paragan.core.types import DiscriminatorOutput

REQUIRED_OUTPUTS = {"classifier": ("class_logits",), "contrastive": ("embedding", "proxies"), "": ()}


def require_outputs(conditioning: str, output: DiscriminatorOutput, labels: Tensor | None) -> None:
    """Unusable where a D does not say what is to be learnt of it, or where no labels are told. conditioning: of the
    objective."""
    if not conditioning:
        return
    said = output._asdict()
    missing = [name for name in REQUIRED_OUTPUTS[conditioning] if said[name] is None]
    if missing or labels is None:
        needs = (
            f"a D that returns Verdict(logits, {', '.join(f'{name}=...' for name in REQUIRED_OUTPUTS[conditioning])})"
        )
        what = f"this D gives no {missing[0]}" if missing else "no labels are told"
        raise UsageError(f"objective.{conditioning}: {what}; use {needs} and labels, or objective.{conditioning}=0")


def classification_loss(output: DiscriminatorOutput, labels: Tensor | None) -> Tensor:
    """Cross entropy of an auxiliary classifier (AC-GAN, Odena et al. 2017). Scalar, a mean over images."""
    require_outputs("classifier", output, labels)
    assert output.class_logits is not None
    assert labels is not None
    return cross_entropy(output.class_logits.float(), labels)


def contrastive_loss(output: DiscriminatorOutput, labels: Tensor | None, per_lane: int, temperature: float) -> Tensor:
    """The 2C loss (ContraGAN, Kang & Park 2020, eq. 8). Scalar, a mean over images.

    Each image's embedding is drawn to its label's proxy and to the images of its class, and away from all others, those
    of its own lane: so it does not matter which lanes share a rank. An image is not compared with itself.
    """
    require_outputs("contrastive", output, labels)
    assert output.embedding is not None
    assert output.proxies is not None
    assert labels is not None
    x = output.embedding.float().unflatten(0, (-1, per_lane))  # [lanes, n, E]
    proxies, y = output.proxies.float().view_as(x), labels.view(-1, per_lane)
    with torch.autocast(x.device.type, enabled=False):
        to_others = x @ x.mT / temperature  # [lanes, n, n]
    to_proxy = (x * proxies).sum(-1, keepdim=True) / temperature
    itself = torch.eye(per_lane, dtype=torch.bool, device=x.device)
    others = to_others.masked_fill(itself, -torch.inf)
    alike = others.masked_fill(y[:, :, None] != y[:, None, :], -torch.inf)
    drawn = torch.cat([to_proxy, alike], -1).logsumexp(-1)
    return (torch.cat([to_proxy, others], -1).logsumexp(-1) - drawn).mean()
