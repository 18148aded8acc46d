"""Between latents and labels; videos; the page."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from importlib import metadata

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image

import paragan
from advice import advises
from browser import Browser
from examples import mixture
from paragan.core.errors import UsageError
from paragan.models.interpolation import blended_labels, slerp
from paragan.models.latent_walk import walk
from paragan.models.model import load_model, make_model_config, save_model
from paragan.models.sampler import LabelPrior
from paragan.models.server import create_app, interpolate_image, sample_images, serve
from paragan.models.video import write_video
from paragan.nets import Spec
from processes import run_cli, usage_error
from servers import run_app


def test_slerp_is_an_arc():
    a, b = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    third = slerp(a, b, torch.tensor([1 / 3]))[0]
    angle, length = np.pi / 6, 3 * 2 / 3 + 1 / 3
    np.testing.assert_allclose(third, [length * np.cos(angle), length * np.sin(angle)], rtol=1e-6)
    for t, end in ((0.0, a), (1.0, b)):
        torch.testing.assert_close(slerp(a, b, torch.tensor([t])), end)
    torch.testing.assert_close(slerp(a, a, torch.tensor([0.4])), a)
    torch.testing.assert_close(slerp(a, -a, torch.tensor([0.25])), a / 2)


def test_slerp_preserves_length_and_speed():
    a, b = torch.nn.functional.normalize(torch.randn(2, 64), dim=1)[:, None] * 8
    path = slerp(a.expand(9, -1), b.expand(9, -1), torch.linspace(0, 1, 9))
    assert torch.equal(path[[0, -1]], torch.cat([a, b]))
    torch.testing.assert_close(path.norm(dim=1), torch.full((9,), 8.0))
    angles = torch.acos((path[1:] * path[:-1]).sum(1) / 64)
    torch.testing.assert_close(angles, angles[:1].expand(8), rtol=1e-3, atol=0)


def test_a_walk_is_a_loop_through_samples(small):
    model = paragan.load(small)
    frames = walk(model, stops=3, frames_per_stop=4, seed=5, labels=["ant", "cat"], truncation=0.7)
    assert (frames.shape, frames.dtype) == ((12, 32, 32, 3), np.uint8)
    samples = model.sample(3, ["ant", "cat"], 0.7, 5)
    assert np.abs(frames[::4].astype(int) - samples).max() <= 1  # the arc ends where it began, up to rounding
    np.testing.assert_array_equal(frames, walk(model, 3, 4, 5, ["ant", "cat"], 0.7))
    assert not np.array_equal(frames, walk(model, 3, 4, 6, ["ant", "cat"], 0.7))


@torch.no_grad()
def test_blended_labels_interpolate_embeddings(small):
    sampler = paragan.load(small).sampler
    g = sampler.g
    z, ant, cat = torch.randn(2, 8), torch.tensor([0, 0]), torch.tensor([2, 2])
    with blended_labels(sampler, cat, torch.tensor([0.0, 1.0])):
        images = g(z, ant)
    torch.testing.assert_close(images[0], g(z, ant)[0])
    torch.testing.assert_close(images[1], g(z, cat)[1])
    half = g.conditions.shared.weight[[0, 2]].mean(0)
    with blended_labels(sampler, cat, torch.tensor([0.5, 0.5])):
        images = g(z, ant)
    g.conditions.shared.weight[0] = half
    torch.testing.assert_close(images, g(z, ant))


def test_per_label_models_change_label_halfway(per_label):
    model = paragan.load(per_label)
    frames = walk(model, stops=2, frames_per_stop=4, seed=1, labels=["a", "b"])
    samples = model.sample(2, ["a", "b"], seed=1)
    assert np.abs(frames[::4].astype(int) - samples).max() <= 1
    single = walk(model, stops=2, frames_per_stop=4, seed=1, labels=["a"])
    np.testing.assert_array_equal(frames[:2], single[:2])
    assert not np.array_equal(frames[2:4], single[2:4])


@pytest.mark.parametrize("name", ["walk.gif", "walk.webp", "walk.mp4"])
def test_videos(small, tmp_path, name):
    line = ["sample", small, "--video", tmp_path / name, "--seconds=1", "--fps=6", "--stops=3"]
    assert run_cli(*line).out == f"6 frames in {tmp_path / name}\n"
    if name.endswith("mp4"):
        frames = decode_video(tmp_path / name, 256, 256)
        expected = walk(paragan.load(small), 3, 2).repeat(8, axis=1).repeat(8, axis=2)
        assert frames.shape == expected.shape
        assert np.abs(frames.astype(int) - expected).mean() < 16  # it is compressed, colours more
    else:
        with Image.open(tmp_path / name) as video:
            assert (video.n_frames, video.size, video.info["loop"]) == (6, (256, 256), 0)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def decode_video(path, height, width):
    """[N, H, W, 3] of a video, by ffmpeg."""
    line = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    data = subprocess.run(line, capture_output=True, check=True, timeout=250).stdout
    return np.frombuffer(data, np.uint8).reshape(-1, height, width, 3)


def test_grey_and_odd_frames(tmp_path):
    frames = np.random.default_rng(0).integers(256, size=(3, 257, 255, 1), dtype=np.uint8)
    for name in ("a.gif", "a.mp4"):
        write_video(frames, tmp_path / name, 10)
        assert (tmp_path / name).stat().st_size > 1000


def test_bad_input(small, tmp_path):
    assert "--seconds" in usage_error("sample", small, "--video", tmp_path / "a.gif", "--seconds=0")
    assert "a .gif shows at most 50" in usage_error("sample", small, "--video", tmp_path / "a.gif", "--fps=60")
    assert "not allowed with" in usage_error("sample", small, "--video", "a.gif", "--out", "a.png")
    with pytest.raises(UsageError, match="no class 'dog'"):
        walk(paragan.load(small), 2, 2, labels=["dog"])


def test_videos_are_of_a_format_as_advised(tmp_path, monkeypatch):
    frames = np.zeros((2, 64, 64, 3), np.uint8)
    with advises(f"--video {tmp_path / 'a.avi'}: unknown format. Use .mp4, .gif, .webp"):
        write_video(frames, tmp_path / "a.avi", 10)
    for name in ("a.mp4", "a.gif", "a.webp"):
        write_video(frames, tmp_path / name, 10)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "imageio_ffmpeg", None)
        with advises("--video: an .mp4 needs imageio-ffmpeg. Use pip install imageio-ffmpeg, or a .gif or .webp"):
            write_video(frames, tmp_path / "b.mp4", 10)
        for name in ("b.gif", "b.webp"):
            write_video(frames, tmp_path / name, 10)
    assert any("imageio-ffmpeg" in line and "video" in line for line in metadata.requires("paragan") or ())
    write_video(frames, tmp_path / "b.mp4", 10)  # with the package


@pytest.mark.slow
def test_serve_answers_until_interrupted(small):
    line = [sys.executable, "-m", "paragan", "serve", str(small), "--port=0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            address = process.stdout.readline().split()[0]
            at = urllib.parse.urlsplit(address)
            with socket.create_connection((at.hostname, at.port)):  # as browsers do ahead of what they ask
                assert json.loads(fetch(f"{address}/api/model", 20))["classes"] == ["ant", "bee", "cat"]
            foreign = urllib.request.Request(f"{address}/api/model", headers={"Host": "elsewhere.example"})
            with pytest.raises(urllib.error.HTTPError, match="400"):  # a page of elsewhere, by a name of its own
                urllib.request.urlopen(foreign, timeout=250)
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_free_port_is_used_as_advised(small, monkeypatch):
    monkeypatch.setattr("werkzeug.serving.BaseWSGIServer.serve_forever", lambda server: None)
    model, out = paragan.load(small), io.StringIO()
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        with advises(f"--port {port}: not available on 127.0.0.1 (Address already in use). Use 0 for a free port"):
            serve(model, "127.0.0.1", port, out)
        serve(model, "127.0.0.1", 0, out)
    assert f"serves {small}" in out.getvalue()


def test_an_address_of_this_machine_is_used_as_advised(small, monkeypatch):
    monkeypatch.setattr("werkzeug.serving.BaseWSGIServer.serve_forever", lambda server: None)
    model, out = paragan.load(small), io.StringIO()
    with advises(
        "--host 192.0.2.1: is no address of this machine (Cannot assign requested address). Use 127.0.0.1, or 0.0.0.0 "
        "for all"
    ):
        serve(model, "192.0.2.1", 0, out)
    for host in ("127.0.0.1", "0.0.0.0"):
        serve(model, host, 0, out)
        assert f"http://{host}:" in out.getvalue()


def test_models_of_images_are_served_as_advised(small, tmp_path):
    nets, spec = mixture.Nets(name="examples.mixture:Nets", width=4), Spec(0, 0, 0, (2,))
    save_model(tmp_path, nets.generator(spec), None, make_model_config(nets, spec, LabelPrior(()), (), kimg=1.0))
    with advises("paragan serve: this model makes numbers. Use a model of images"):
        create_app(load_model(tmp_path, nets=nets))
    assert create_app(paragan.load(small))


def test_a_generator_for_each_label_samples_as_advised(per_label):
    model = paragan.load(per_label)
    with advises("/api/interpolate: needs a model with one generator that takes latents. Use /api/sample"):
        interpolate_image(model, {})
    assert sample_images(model, {}).shape == (16, 8, 8, 1)


# The page ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(small):
    with run_app(create_app(paragan.load(small))) as address:
        yield address


def fetch(address: str, timeout: float = 60) -> bytes:
    with urllib.request.urlopen(address, timeout=timeout) as answer:
        return answer.read()


def test_the_page_is_self_contained(address):
    page = fetch(address).decode()
    assert "http" not in page.replace("<!doctype html>", "")
    assert all(name in page for name in ("ant", "bee", "cat"))
    assert json.loads(fetch(f"{address}/api/model"))["resolution"] == 32


def test_the_page_samples(address, small):
    sheet = np.asarray(Image.open(io.BytesIO(fetch(f"{address}/api/sample?count=4&labels=cat&truncation=0.5&seed=7"))))
    expected = paragan.load(small).sample(4, ["cat"], 0.5, 7)
    np.testing.assert_array_equal(sheet[:64:2, :64:2], expected[0])  # each pixel twice
    np.testing.assert_array_equal(sheet[66::2, 66::2], expected[3])  # behind a gutter of 2


def test_the_page_interpolates(address, small):
    query = "a=3&b=4&label_a=ant&label_b=cat"
    one, half, other = (fetch(f"{address}/api/interpolate?{query}&weight={weight}") for weight in (0, 0.5, 1))
    image = np.asarray(Image.open(io.BytesIO(one)))[::2, ::2].astype(int)
    assert np.abs(image - paragan.load(small).sample(1, ["ant"], seed=3)[0]).max() <= 1
    assert len({one, half, other}) == 3


def test_seeds_are_integers_of_any_size(address, small):
    """JSON's and JavaScript's numbers end at 2^53; what is typed goes through as text."""
    first, second = (fetch(f"{address}/api/sample?count=1&labels=cat&seed={seed}") for seed in (2**62, 2**62 + 1))
    assert first != second
    sheet = np.asarray(Image.open(io.BytesIO(fetch(f"{address}/api/sample?count=1&labels=cat&seed={2**63 - 1}"))))
    np.testing.assert_array_equal(sheet[::2, ::2], paragan.load(small).sample(1, ["cat"], seed=2**63 - 1)[0])


@pytest.mark.browser
def test_sliders_show_their_values(small, tmp_path):
    page = tmp_path / "page.html"
    page.write_bytes(create_app(paragan.load(small)).test_client().get("/").data)
    with Browser() as browser:
        tab = browser.open(page, 390, 844)
        assert tab.evaluate("[...document.querySelectorAll('output')].map(one => one.value)") == ["1", "1", "0.5"]
        for key in ("ArrowRight", "ArrowLeft", "ArrowLeft"):
            tab.evaluate("document.querySelector('[name=weight]').focus()")
            tab.press_key(key)
        tab.wait_until("document.querySelector('#interpolate').querySelectorAll('output')[1].value == 0.48")
        assert tab.evaluate("document.querySelector('#sample output').value") == "1"
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("query", ["sample?seed=1e3", f"sample?seed={2**63}", "sample?count=1.5", "interpolate?a=inf"])
def test_non_integers_are_rejected(address, query):
    with pytest.raises(urllib.error.HTTPError) as error:
        fetch(f"{address}/api/{query}")
    with error.value as answer:
        assert answer.code == 400


@pytest.mark.parametrize(
    "query",
    [
        "sample?labels=dog",
        f"sample?labels={'9' * 5000}",
        "sample?count=0",
        "sample?truncation=x",
        "interpolate?weight=nan",
    ],
)
def test_errors_are_json(address, query):
    with pytest.raises(urllib.error.HTTPError) as error:
        fetch(f"{address}/api/{query}")
    with error.value as answer:
        assert answer.code == 400
        assert json.loads(answer.read())["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"count": 0}, "count=0"), ({"count": 2, "seed": -1}, "seed=-1"), ({"count": 2, "labels": []}, "none are given")],
)
def test_python_arguments_have_the_bounds_of_the_command_line(small, arguments, message):
    with pytest.raises(UsageError, match=message):
        paragan.load(small).sample(**arguments)
