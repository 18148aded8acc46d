"""`paragan serve`: a web page to sample from a model. Needs Flask (the extra `web`).

    GET /                    the page: labels, truncation, seed, interpolation
    GET /api/model           a description of the model, JSON
    GET /api/sample          ?count=16&labels=3,7&truncation=0.7&seed=0 -> a grid, image/png
    GET /api/interpolate     ?a=0&b=1&weight=0.5&label_a=3&label_b=7&truncation=1 -> one image, image/png

The page loads nothing from other servers. Requests are answered one at a time, since interpolating labels puts hooks on
the network.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

import numpy as np
import torch

from paragan.core.errors import UsageError
from paragan.core.image_grid import integer_upscale, make_grid
from paragan.core.web_server import serve_until_interrupted, trusted_hosts
from paragan.models.interpolation import sample_interpolated, slerp
from paragan.models.model import Model, parse_label
from paragan.models.sampler import Sampler, sample_latent

N = TypeVar("N", int, float)
MAX_IMAGES = 256  # of a grid


def create_app(model: Model, allowed_hosts: Sequence[str] | None = None) -> Any:
    """Return the WSGI application of a model's page.

    allowed_hosts: the only host names that requests may use (None: any).
    """
    try:
        import flask
    except ImportError as error:
        raise UsageError("paragan serve needs Flask: pip install flask") from error
    app = flask.Flask(__name__, template_folder=".")
    app.config["TRUSTED_HOSTS"] = allowed_hosts
    info = _model_info(model)
    lock = threading.Lock()  # interpolating labels changes the network for a moment

    def png_response(make_images: Callable[..., np.ndarray]) -> Any:
        with lock:
            images = make_images(model, flask.request.args)
        file = io.BytesIO()
        make_grid(images, scale=integer_upscale(images)).save(file, "PNG")
        return flask.Response(file.getvalue(), mimetype="image/png")

    def page() -> str:
        return flask.render_template("server.html", model=info)

    def sample() -> Any:
        return png_response(sample_images)

    def interpolate() -> Any:
        return png_response(interpolate_image)

    def handle_usage_error(error: UsageError) -> Any:
        return flask.jsonify(error=str(error)), 400

    app.add_url_rule("/", view_func=page)
    app.add_url_rule("/api/model", endpoint="model_info", view_func=lambda: flask.jsonify(info))
    app.add_url_rule("/api/sample", view_func=sample)
    app.add_url_rule("/api/interpolate", view_func=interpolate)
    app.register_error_handler(UsageError, handle_usage_error)
    return app


def _model_info(model: Model) -> dict[str, Any]:
    if model.spec.array_shape:
        raise UsageError("paragan serve: this model makes numbers. Use a model of images")
    spec = model.spec.sample_spec
    return {
        "name": model.config.get("recipe", "custom"),
        "networks": model.config.get("net", {}).get("name", "per-label"),
        "resolution": spec.resolution,
        "width": spec.size.width,
        "height": spec.size.height,
        "channels": spec.channels,
        "classes": list(model.classes),
        "kimg": model.kimg,
        "interpolates": isinstance(model.sampler, Sampler) and model.sampler.uses_latents,
    }


def sample_images(model: Model, query: Mapping[str, str]) -> np.ndarray:
    """Return the images of /api/sample, uint8 [n, H, W, C]."""
    count = _int_arg(query, "count", 16, 1, MAX_IMAGES)
    labels = [word for word in query.get("labels", "").split(",") if word] or None
    return model.sample(count, labels, _truncation_arg(query), _int_arg(query, "seed", 0, 0, 2**63 - 1))


def interpolate_image(model: Model, query: Mapping[str, str]) -> np.ndarray:
    """Return the image of /api/interpolate, uint8 [1, H, W, C]: between two latents and two labels."""
    sampler = model.sampler
    if not isinstance(sampler, Sampler) or not sampler.uses_latents:
        raise UsageError("/api/interpolate: needs a model with one generator that takes latents. Use /api/sample")
    truncation = _truncation_arg(query)
    weight = _float_arg(query, "weight", 0.5, 0, 1)
    seeds = [_int_arg(query, end, i, 0, 2**63 - 1) for i, end in enumerate("ab")]
    a, b = (torch.from_numpy(sample_latent(seed, 0, sampler.latent_size, truncation))[None] for seed in seeds)
    label_pair = None
    if model.classes:
        label_a = parse_label(query.get("label_a", "0"), model.classes)
        label_b = parse_label(query.get("label_b", "0"), model.classes)
        label_pair = (label_a, label_b)
    images = sample_interpolated(sampler, slerp(a, b, torch.tensor([weight])), label_pair, weight)
    return images.permute(0, 2, 3, 1).numpy()


def _truncation_arg(query: Mapping[str, str]) -> float:
    return _float_arg(query, "truncation", 1.0, 0.05, 1.0)


def _float_arg(query: Mapping[str, str], name: str, default: float, minimum: float, maximum: float) -> float:
    return _parse_arg(float, "number", query, name, default, minimum, maximum)


def _int_arg(query: Mapping[str, str], name: str, default: int, minimum: int, maximum: int) -> int:
    """Parse an integer. Seeds are too large to be parsed as floats."""
    return _parse_arg(int, "whole number", query, name, default, minimum, maximum)


def _parse_arg(
    number_type: type[N], type_name: str, query: Mapping[str, str], name: str, default: N, minimum: N, maximum: N
) -> N:
    text = query.get(name, "")
    try:
        value = number_type(text) if text else default
    except ValueError:
        raise UsageError(f"{name}={text[:40]}: not a {type_name}") from None
    if not minimum <= value <= maximum:
        raise UsageError(f"{name}={text}: out of range. Use {minimum} to {maximum}")
    return value


def serve(model: Model, host: str, port: int, out: TextIO) -> None:
    """Serve the page until interrupted.

    Raises:
        UsageError: the port is taken, or the host is no address of this machine.
    """
    app = create_app(model, trusted_hosts(host))
    serve_until_interrupted(app, host, port, f"serves {model.folder}", out)
