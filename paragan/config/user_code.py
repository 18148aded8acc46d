"""Networks and objectives that the user defines: `module:Class` in a run, or objects from Python.

What such classes may define is read here, in one place (docs/custom_code.md)."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field
from torch import nn

from paragan.core.errors import UsageError
from paragan.core.schema import from_dict, name_shorthand, or_user_class
from paragan.core.types import Batch, DiscriminatorFn, Loss
from paragan.game.game import ConditioningFn
from paragan.losses.adversarial import Adversarial
from paragan.losses.denoising import Denoising
from paragan.losses.distribution_matching import DistributionMatching
from paragan.losses.reconstruction import Reconstruction
from paragan.nets import Nets, Spec

RenderFn = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (samples [n, ...], reals [n, ...]) -> uint8 [H, W, 1 or 3]


def validate_user_nets(nets: Any) -> None:
    """Raise UsageError if networks define neither the size of the latent nor another input of G."""
    if conditioning_input_of(nets) is None and not (isinstance(getattr(nets, "latent", None), int) and nets.latent > 0):
        raise UsageError(
            "latent: is missing. Define latent (the size of z) or conditioning_input(real) (what G gets in place of z)"
        )


AnyNets = Annotated[Nets, or_user_class(validate_user_nets, "generator", "discriminator"), name_shorthand]


def name_objective(value: Any) -> Any:
    """Name the objective that fields without a name belong to."""
    return {"name": "adversarial", **value} if isinstance(value, Mapping) else value  # pyright: ignore


AnyObjective = Annotated[
    Adversarial | Reconstruction | Denoising | DistributionMatching,
    Field(discriminator="name"),
    or_user_class(lambda objective: None, "second_order", "discriminator", "generator"),
    BeforeValidator(name_objective),
    name_shorthand,
]


@dataclass(frozen=True)
class UserObjective:
    """An objective that has two losses, and maybe `uses_fakes`, `replayed_fields`, `make_state` and `make_g_state`."""

    user_objective: Any
    latent_perturbation: float = 0.0

    @property
    def second_order(self) -> bool:
        return bool(self.user_objective.second_order)

    @property
    def uses_fakes(self) -> bool:
        return bool(getattr(self.user_objective, "uses_fakes", True))

    @property
    def replayed_fields(self) -> tuple[str, ...]:
        return tuple(getattr(self.user_objective, "replayed_fields", ()))

    def discriminator(self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int) -> Loss:
        return self.user_objective.discriminator(d, real, fake, step)

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        return self.user_objective.generator(d, fake, real, step)

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        return None

    def make_state(self, step_images: int) -> nn.Module | None:
        """Return what D remembers for the objective, if it defines `make_state`."""
        make = getattr(self.user_objective, "make_state", None)
        return make(step_images) if make else None

    def make_g_state(self, g: nn.Module) -> nn.Module | None:
        """Return what G remembers for the objective, if it defines `make_g_state`."""
        make = getattr(self.user_objective, "make_g_state", None)
        return make(g) if make else None


def load_user_nets(config: Any) -> Any:
    """Build networks from their plain record. This imports the module that it names."""
    return from_dict(AnyNets, config)  # pyright: ignore


def is_user_defined(nets: Any, objective: Any = None) -> bool:
    """Return whether the networks or the objective are user-defined, so that they have to be tried."""
    return not (_is_builtin(nets, "nets") and (objective is None or _is_builtin(objective, "losses")))


def _is_builtin(part: Any, package: str) -> bool:
    prefix = f"{__name__.partition('.')[0]}.{package}"
    return type(part).__module__.startswith(f"{prefix.rstrip('.')}.")


def user_code_digest(*parts: Any) -> str:
    """Return a digest of the source files of user-defined parts: their packages and folders, as far as loaded.

    Returns "" if all are built in.
    """
    modules = [sys.modules.get(type(part).__module__) for part in parts if not _is_builtin(part, "")]
    packages = {module.__name__.partition(".")[0] for module in modules if module}
    folders = {Path(file).parent for module in modules if (file := getattr(module, "__file__", None))}
    files: set[Path] = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and (name.partition(".")[0] in packages or Path(file).parent in folders):
            files.add(Path(file))
    digest = hashlib.sha256()
    for path in sorted(files):
        with contextlib.suppress(OSError):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16] if files else ""


def conditioning_input_of(nets: Any) -> ConditioningFn | None:
    """Return what networks give to G in place of latents, if they define `conditioning_input`."""
    return getattr(nets, "conditioning_input", None)


def render_fn_of(nets: Any) -> RenderFn | None:
    """Return how user-defined networks draw samples, if they define `render`."""
    return getattr(nets, "render", None)


def _images_hint(shape: Sequence[int]) -> str:
    """Return how arrays that may be images become images."""
    is_image = len(shape) == 2 or (len(shape) == 3 and shape[-1] <= 4)
    return ", or, if they are images, store them with np.savez('images.npz', images=x)" if is_image else ""


def check_nets(nets: Any, spec: Spec) -> None:
    """Raise UsageError if networks cannot be built for such data."""
    if spec.array_shape and not is_user_defined(nets) and not getattr(nets, "takes_arrays", False):
        raise UsageError(
            f"--nets={nets.name}: makes images, and the data are arrays {list(spec.array_shape)}. Use networks of your "
            f"own, --nets=module:Class{_images_hint(spec.array_shape)}"
        )
    if check := getattr(nets, "check", None):
        check(spec)


def weight_clip_of(objective: Any) -> float:
    """Return the bound that the weights of D are clipped to, or 0."""
    return getattr(objective, "clip", 0.0)
