"""Models on the Hugging Face hub: `HubModel(model).push_to_hub("user/name")`, `HubModel.from_pretrained("user/name")`.

Needs the extra `paragan[hub]`. What is pushed is what `paragan export` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paragan.core.errors import Unusable
from paragan.models.export_folder import write_folder
from paragan.models.model import Model, load_model

try:
    import huggingface_hub
    from huggingface_hub import ModelHubMixin
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
except ImportError as missing:
    raise Unusable("models on the Hugging Face hub need huggingface_hub: pip install 'paragan[hub]'") from missing

FILES = ["*.safetensors", "config.json", "*/config.json"]


def fetched(name: str, revision: str | None = None, **how: Any) -> Path:
    """The folder of a model of the hub, downloaded once. Only weights and their configuration are."""
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=FILES, **how))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise Unusable(f"{name} is no folder here, and the hub does not give it: {said}") from error


def push(model: Model, name: str) -> str:
    """Put a model onto the hub; its address."""
    try:
        return str(HubModel(model).push_to_hub(name))
    except Unusable:
        raise
    except Exception as error:  # also those of the library that the hub is reached by, which changes
        raise Unusable(f"--push {name}: {' '.join(str(error).split())[:300]}") from error


class HubModel(ModelHubMixin, library_name="paragan"):
    """A model with `save_pretrained(folder)`, `push_to_hub("user/name")` and `from_pretrained("user/name")`."""

    def __init__(self, model: Model):
        self.model = model

    def _save_pretrained(self, save_directory: Path) -> None:
        write_folder(self.model, save_directory)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        **more: Any,
    ) -> HubModel:
        if Path(model_id).is_dir():
            return cls(load_model(model_id, **more))
        how = {"cache_dir": cache_dir, "force_download": force_download, "local_files_only": local_files_only}
        return cls(load_model(fetched(model_id, revision, token=token, **how), **more))

    def generate_model_card(self, *args: Any, **kwargs: Any) -> Any:
        """That of `paragan export`; `save_pretrained` asks for one after ours is written, and keeps ours."""
        from huggingface_hub import ModelCard

        from paragan.models.model_card import card

        return ModelCard(card(self.model))
