"""Losses of D's classifier or embedding, from which D and G learn the classes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from paragan.core.errors import UsageError
from paragan.core.types import DiscriminatorOutput

REQUIRED_OUTPUTS = {"classifier": ("class_logits",), "contrastive": ("embedding", "proxies"), "": ()}


def require_outputs(conditioning: str, output: DiscriminatorOutput, labels: Tensor | None) -> None:
    """Check that D returns what the objective needs, and that there are labels.

    Args:
        conditioning: `Adversarial.required_d_conditioning`; "" needs nothing.
        output: What D returned.
        labels: int64 [N] or None.

    Raises:
        UsageError: An output or the labels are missing.
    """
    if not conditioning:
        return
    outputs = output._asdict()
    missing = [name for name in REQUIRED_OUTPUTS[conditioning] if outputs[name] is None]
    if missing or labels is None:
        problem = f"this D returns no {missing[0]}" if missing else "there are no labels"
        fields = ", ".join(f"{name}=..." for name in REQUIRED_OUTPUTS[conditioning])
        raise UsageError(
            f"objective.{conditioning}: {problem}. Use labels and a D that returns "
            f"DiscriminatorOutput(logits, {fields}), or objective.{conditioning}=0"
        )


def classification_loss(output: DiscriminatorOutput, labels: Tensor | None) -> Tensor:
    """Compute the cross entropy of D's classifier (AC-GAN, Odena et al. 2017). Scalar, a mean over images."""
    require_outputs("classifier", output, labels)
    assert output.class_logits is not None
    assert labels is not None
    return cross_entropy(output.class_logits.float(), labels)


def contrastive_loss(output: DiscriminatorOutput, labels: Tensor | None, per_lane: int, temperature: float) -> Tensor:
    """Compute the 2C loss (ContraGAN, Kang & Park 2020, eq. 8). Scalar, a mean over images.

    Each embedding is pulled towards its label's proxy and towards the images of its class, and pushed away from the
    others. Only images of the same lane are compared, so that the loss does not depend on which lanes share a rank. An
    image is not compared with itself.

    Args:
        output: D's output with `embedding` and `proxies`, [N, E] each.
        labels: int64 [N].
        per_lane: Images per lane.
        temperature: Divides the similarities.
    """
    require_outputs("contrastive", output, labels)
    assert output.embedding is not None
    assert output.proxies is not None
    assert labels is not None
    x = output.embedding.float().unflatten(0, (-1, per_lane))  # [lanes, n, E]
    proxies = output.proxies.float().view_as(x)
    y = labels.view(-1, per_lane)
    with torch.autocast(x.device.type, enabled=False):
        to_others = x @ x.mT / temperature  # [lanes, n, n]
    to_proxy = (x * proxies).sum(-1, keepdim=True) / temperature
    diagonal = torch.eye(per_lane, dtype=torch.bool, device=x.device)
    others = to_others.masked_fill(diagonal, -torch.inf)
    same_class = others.masked_fill(y[:, :, None] != y[:, None, :], -torch.inf)
    positive = torch.cat([to_proxy, same_class], -1).logsumexp(-1)
    return (torch.cat([to_proxy, others], -1).logsumexp(-1) - positive).mean()
