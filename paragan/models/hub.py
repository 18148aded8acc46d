"""Models on the Hugging Face hub: `HubModel(model).push_to_hub("user/name")`, `HubModel.from_pretrained("user/name")`.

Needs huggingface_hub (the extra `hub`). It pushes what `paragan export` writes, and downloads weights and configuration
only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paragan.core.errors import UsageError
from paragan.models.export_folder import write_model_folder
from paragan.models.model import Model, load_model

try:
    import huggingface_hub
    from huggingface_hub import ModelHubMixin, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
except ImportError as missing:
    raise UsageError("models on the Hugging Face hub need huggingface_hub: pip install huggingface_hub") from missing

DOWNLOAD_PATTERNS = ["*.safetensors", "config.json", "*/config.json"]


def download_model(name: str, revision: str | None = None, **download_options: Any) -> Path:
    """Download a model of the hub, unless it is cached. Returns the local folder."""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=DOWNLOAD_PATTERNS, **download_options
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        message = " ".join(str(error).split())[:200]
        raise UsageError(f"{name}: not a local folder, and not available on the hub: {message}") from error


def push_model(model: Model, name: str) -> str:
    """Push a model to the hub. Returns its URL."""
    try:
        return str(HubModel(model).push_to_hub(name))
    except UsageError:
        raise
    except Exception as error:  # errors of the HTTP library differ between versions
        raise UsageError(f"--push {name}: {constants.ENDPOINT}: {' '.join(str(error).split())[:300]}") from error


class HubModel(ModelHubMixin, library_name="paragan"):
    """A model with `save_pretrained(folder)`, `push_to_hub("user/name")` and `from_pretrained("user/name")`."""

    def __init__(self, model: Model):
        self.model = model

    def _save_pretrained(self, save_directory: Path) -> None:
        write_model_folder(self.model, save_directory)

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
        **load_options: Any,
    ) -> HubModel:
        if Path(model_id).is_dir():
            return cls(load_model(model_id, **load_options))
        folder = download_model(
            model_id,
            revision,
            token=token,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
        )
        return cls(load_model(folder, **load_options))

    def generate_model_card(self, *args: Any, **kwargs: Any) -> Any:
        """Return the card of `paragan export`. `save_pretrained` keeps the one that is already written."""
        from huggingface_hub import ModelCard

        from paragan.models.model_card import make_model_card

        return ModelCard(make_model_card(self.model))
