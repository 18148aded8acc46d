"""The record of a data set of latents: its autoencoder and normalisation, and the images that were encoded."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from paragan.core.schema import config_class

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Side = Annotated[int, Field(ge=1)]


@config_class
class ImageEncoding:
    """The autoencoder of a data set of latents, their normalisation, and the images that they were made from.

    decoder            : the autoencoder: a run folder, a model folder, or `module:Class`
    fingerprint        : of its weights
    mean, std          : [c] of the latents by channel, over the data set; networks see (latent - mean) / std
    image_shape        : (C, H, W) of the images
    images             : path or address of the images
    images_fingerprint : of them, as they were when they were encoded
    range              : `data.range` with which they were read
    labels             : whether their labels were read, or the key or column that holds them
    """

    decoder: str
    fingerprint: str
    mean: tuple[Annotated[float, Field(allow_inf_nan=False)], ...]
    std: tuple[PositiveFloat, ...]
    image_shape: tuple[Side, Side, Side]
    images: str
    images_fingerprint: str
    range: str = "auto"
    labels: bool | str = True


def is_user_code(reference: str) -> bool:
    """Return whether a reference to an autoencoder is `module:Class` rather than a folder."""
    return re.fullmatch(r"\w+(\.\w+)*:\w+", reference) is not None
