"""`paragan serve`: a small page to sample from a model. Needs the extra `paragan[web]` (Flask).

    GET /                    the page: labels, truncation, seed, interpolation
    GET /api/model           what the model is
    GET /api/sample          ?count=16&labels=3,7&truncation=0.7&seed=0 -> a grid, image/png
    GET /api/between         ?a=0&b=1&share=0.5&label_a=3&label_b=7&truncation=1 -> one image, image/png

The page asks for nothing beyond the server it came from.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

import numpy as np
import torch

from paragan.core.errors import UsageError
from paragan.core.image_grid import integer_upscale, make_grid
from paragan.models.interpolation import sample_interpolated, slerp
from paragan.models.model import Model, parse_label
from paragan.models.sampler import LatentSource, Sampler, sample_latent

N = TypeVar("N", int, float)
MAX_IMAGES = 256  # images of a grid
CONNECTION_TIMEOUT_S = 30.0  # that a connection may say nothing
LOOPBACK_HOSTS = ["localhost", "127.0.0.1"]


def create_app(model: Model, trusted_hosts: Sequence[str] | None = None) -> Any:
    """The page of a model, for any WSGI server. hosts: the only names by which it may be asked (None: any)."""
    try:
        import flask
    except ImportError as error:
        raise UsageError("paragan serve needs Flask: pip install 'paragan[web]'") from error
    app = flask.Flask(__name__, template_folder=".")
    app.config["TRUSTED_HOSTS"] = trusted_hosts
    about, alone = _model_info(model), threading.Lock()  # blending labels changes the network for a moment

    def png_response(make_images: Callable[..., np.ndarray]) -> Any:
        with alone:
            images = make_images(model, flask.request.args)
        file = io.BytesIO()
        make_grid(images, scale=integer_upscale(images)).save(file, "PNG")
        return flask.Response(file.getvalue(), mimetype="image/png")

    def page() -> str:
        return flask.render_template("web.html", about=about)

    def sample() -> Any:
        return png_response(sample_images)

    def interpolate() -> Any:
        return png_response(interpolate_image)

    def handle_usage_error(error: UsageError) -> Any:
        return flask.jsonify(error=str(error)), 400

    app.add_url_rule("/", view_func=page)
    app.add_url_rule("/api/model", endpoint="about", view_func=lambda: flask.jsonify(about))
    app.add_url_rule("/api/sample", view_func=sample)
    app.add_url_rule("/api/between", view_func=interpolate)
    app.register_error_handler(UsageError, handle_usage_error)
    return app


def _model_info(model: Model) -> dict[str, Any]:
    if model.spec.array_shape:
        raise UsageError("paragan serve shows images, and this model makes numbers")
    spec, net = model.spec, model.config.get("net", {}).get("name", "per-label")
    blends = isinstance(model.sampler, Sampler) and isinstance(model.sampler.source, LatentSource)
    return {
        "name": model.config.get("recipe", "custom"),
        "networks": net,
        "resolution": spec.resolution,
        "channels": spec.channels,
        "classes": list(model.classes),
        "kimg": model.kimg,
        "interpolates": blends,
    }


def sample_images(model: Model, query: Mapping[str, str]) -> np.ndarray:
    """Images [n, R, R, C] of a query."""
    count = _int_arg(query, "count", 16, 1, MAX_IMAGES)
    labels = [word for word in query.get("labels", "").split(",") if word] or None
    return model.sample(count, labels, _truncation_arg(query), _int_arg(query, "seed", 0, 0, 2**63 - 1))


def interpolate_image(model: Model, query: Mapping[str, str]) -> np.ndarray:
    """One image [1, R, R, C] between the latents of two seeds, and between two labels."""
    sampler = model.sampler
    if not isinstance(sampler, Sampler) or not isinstance(sampler.source, LatentSource):
        raise UsageError("interpolation needs one generator of latents for all labels")
    psi, share = _truncation_arg(query), _float_arg(query, "share", 0.5, 0, 1)
    seeds = [_int_arg(query, end, i, 0, 2**63 - 1) for i, end in enumerate("ab")]
    a, b = (torch.from_numpy(sample_latent(seed, 0, sampler.latent_size, psi))[None] for seed in seeds)
    pair = None
    if model.classes:
        first, second = (parse_label(query.get(f"label_{end}", "0"), model.classes) for end in "ab")
        pair = (first, second)
    made = sample_interpolated(sampler, slerp(a, b, torch.tensor([share])), pair, share)
    return made.permute(0, 2, 3, 1).numpy()


def _truncation_arg(query: Mapping[str, str]) -> float:
    return _float_arg(query, "truncation", 1.0, 0.05, 1.0)


def _float_arg(query: Mapping[str, str], name: str, default: float, minimum: float, maximum: float) -> float:
    return _parse_arg(float, "number", query, name, default, minimum, maximum)


def _int_arg(query: Mapping[str, str], name: str, default: int, minimum: int, maximum: int) -> int:
    """Seeds may be beyond what a float holds exactly."""
    return _parse_arg(int, "whole number", query, name, default, minimum, maximum)


def _parse_arg(
    number_type: type[N], type_name: str, query: Mapping[str, str], name: str, default: N, minimum: N, maximum: N
) -> N:
    text = query.get(name, "")
    try:
        value = number_type(text) if text else default
    except ValueError:
        raise UsageError(f"{name}={text[:40]} is no {type_name}") from None
    if not minimum <= value <= maximum:
        raise UsageError(f"{name}={text} must be between {minimum} and {maximum}")
    return value


def serve(model: Model, host: str, port: int, out: TextIO) -> None:
    """Answer requests until interrupted. Unusable where the port is taken."""
    app = create_app(
        model, LOOPBACK_HOSTS if host in LOOPBACK_HOSTS else None
    )  # else any page that is open could ask it
    from werkzeug.serving import WSGIRequestHandler, make_server

    class TimeoutRequestHandler(WSGIRequestHandler):
        timeout = CONNECTION_TIMEOUT_S  # browsers open connections ahead of what they ask

    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise UsageError(f"--port {port} on {host} cannot be had ({error.strerror}): 0 is a free one") from error
    how: dict[str, Any] = {"threaded": True, "request_handler": TimeoutRequestHandler, "fd": listening.fileno()}
    with listening, make_server(host, port, app, **how) as server:
        out.write(f"http://{host}:{listening.getsockname()[1]} shows {model.folder}; Ctrl-C ends it\n")
        out.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
