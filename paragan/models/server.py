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

from paragan.core.errors import Unusable
from paragan.core.image_grid import grid, readable
from paragan.models.interpolation import made_of, slerp
from paragan.models.model import Model, one_label
from paragan.models.sampler import Latents, Sampler, latent

N = TypeVar("N", int, float)
MOST = 256  # images of a grid
SILENT_S = 30.0  # that a connection may say nothing
LOOPBACK = ["localhost", "127.0.0.1"]


def application(model: Model, hosts: Sequence[str] | None = None) -> Any:
    """The page of a model, for any WSGI server. hosts: the only names by which it may be asked (None: any)."""
    try:
        import flask
    except ImportError as error:
        raise Unusable("paragan serve needs Flask: pip install 'paragan[web]'") from error
    app = flask.Flask(__name__, template_folder=".")
    app.config["TRUSTED_HOSTS"] = hosts
    about, alone = _about(model), threading.Lock()  # blending labels changes the network for a moment

    def picture(make: Callable[..., np.ndarray]) -> Any:
        with alone:
            images = make(model, flask.request.args)
        file = io.BytesIO()
        grid(images, scale=readable(images)).save(file, "PNG")
        return flask.Response(file.getvalue(), mimetype="image/png")

    def page() -> str:
        return flask.render_template("web.html", about=about)

    def sample() -> Any:
        return picture(sampled)

    def between() -> Any:
        return picture(interpolated)

    def refused(error: Unusable) -> Any:
        return flask.jsonify(error=str(error)), 400

    app.add_url_rule("/", view_func=page)
    app.add_url_rule("/api/model", endpoint="about", view_func=lambda: flask.jsonify(about))
    app.add_url_rule("/api/sample", view_func=sample)
    app.add_url_rule("/api/between", view_func=between)
    app.register_error_handler(Unusable, refused)
    return app


def _about(model: Model) -> dict[str, Any]:
    if model.spec.values:
        raise Unusable("paragan serve shows images, and this model makes numbers")
    spec, net = model.spec, model.config.get("net", {}).get("name", "per-label")
    blends = isinstance(model.sampler, Sampler) and isinstance(model.sampler.source, Latents)
    return {
        "name": model.config.get("recipe", "custom"),
        "networks": net,
        "resolution": spec.resolution,
        "channels": spec.channels,
        "classes": list(model.classes),
        "kimg": model.kimg,
        "interpolates": blends,
    }


def sampled(model: Model, asked: Mapping[str, str]) -> np.ndarray:
    """Images [n, R, R, C] of a query."""
    count = _whole(asked, "count", 16, 1, MOST)
    labels = [word for word in asked.get("labels", "").split(",") if word] or None
    return model.sample(count, labels, _truncation(asked), _whole(asked, "seed", 0, 0, 2**63 - 1))


def interpolated(model: Model, asked: Mapping[str, str]) -> np.ndarray:
    """One image [1, R, R, C] between the latents of two seeds, and between two labels."""
    sampler = model.sampler
    if not isinstance(sampler, Sampler) or not isinstance(sampler.source, Latents):
        raise Unusable("interpolation needs one generator of latents for all labels")
    psi, share = _truncation(asked), _number(asked, "share", 0.5, 0, 1)
    seeds = [_whole(asked, end, i, 0, 2**63 - 1) for i, end in enumerate("ab")]
    a, b = (torch.from_numpy(latent(seed, 0, sampler.latent, psi))[None] for seed in seeds)
    pair = None
    if model.classes:
        first, second = (one_label(asked.get(f"label_{end}", "0"), model.classes) for end in "ab")
        pair = (first, second)
    made = made_of(sampler, slerp(a, b, torch.tensor([share])), pair, share)
    return made.permute(0, 2, 3, 1).numpy()


def _truncation(asked: Mapping[str, str]) -> float:
    return _number(asked, "truncation", 1.0, 0.05, 1.0)


def _number(asked: Mapping[str, str], name: str, default: float, least: float, most: float) -> float:
    return _read(float, "number", asked, name, default, least, most)


def _whole(asked: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """Seeds may be beyond what a float holds exactly."""
    return _read(int, "whole number", asked, name, default, least, most)


def _read(kind: type[N], called: str, asked: Mapping[str, str], name: str, default: N, least: N, most: N) -> N:
    text = asked.get(name, "")
    try:
        value = kind(text) if text else default
    except ValueError:
        raise Unusable(f"{name}={text[:40]} is no {called}") from None
    if not least <= value <= most:
        raise Unusable(f"{name}={text} must be between {least} and {most}")
    return value


def serve(model: Model, host: str, port: int, out: TextIO) -> None:
    """Answer requests until interrupted. Unusable where the port is taken."""
    app = application(model, LOOPBACK if host in LOOPBACK else None)  # else any page that is open could ask it
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Patient(WSGIRequestHandler):
        timeout = SILENT_S  # browsers open connections ahead of what they ask

    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise Unusable(f"--port {port} on {host} cannot be had ({error.strerror}): 0 is a free one") from error
    how: dict[str, Any] = {"threaded": True, "request_handler": Patient, "fd": listening.fileno()}
    with listening, make_server(host, port, app, **how) as server:
        out.write(f"http://{host}:{listening.getsockname()[1]} shows {model.folder}; Ctrl-C ends it\n")
        out.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
