"""Processes that decode: the bits that threads make, whatever becomes of them."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from advice import advises
from fake_datasets import encode_image, random_images
from paragan.core.errors import RunError
from paragan.data.dataset import load_data
from paragan.data.loader import decode_worker as decoders
from paragan.data.loader.autotune import PipelineKnobs, TunerState, WindowStats, tune
from paragan.data.loader.decode_worker import DecodeWorker
from paragan.data.loader.prefetch import BatchIndices, PrefetchOptions, PrefetchPipeline
from paragan.data.loader.shared_memory import SPARE_BLOCKS, AttachedArena, SharedArena
from paragan.data.source import DecodeError
from paragan.data.streaming import StreamingImages


class Fatal:
    """Whoever is sent this dies."""

    def __reduce__(self):
        return os._exit, (7,)


@pytest.fixture
def shared():
    return SharedArena()


def test_a_worker_decodes_into_shared_memory(shared):
    pixels = random_images(4)
    shared.allocate((5, 8, 8, 3))
    piece = shared.allocate((6, 8, 8, 3))
    piece.array[:] = 7
    with DecodeWorker(shared) as decoder:
        gots = [encode_image(pixels[0]), b"no image", encode_image(pixels[2]), DecodeError("was never there")]
        reasons, spent = decoder.decode(gots, [False, False, True, True], piece, 1)
        assert reasons == [None, "not a PNG, JPEG, WebP, BMP, TIFF or GIF image", None, "was never there"]
        assert spent.cpu_s > 0
        assert np.array_equal(piece.array[1], pixels[0])
        assert np.array_equal(piece.array[3], pixels[2][:, ::-1])
        assert (piece.array[[0, 5]] == 7).all()
        later = shared.allocate((9, 8, 8, 3))  # the file grew since the process looked
        assert decoder.decode([encode_image(pixels[3])], [False], later, 8)[0] == [None]
        assert np.array_equal(later.array[8], pixels[3])


def test_a_worker_starts_without_torch():
    """It takes seconds to import, during which the training loop of a busy machine waits for images."""
    modules = "paragan.data.loader.decode_worker, paragan.data.records.decoder"
    assert not subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; sys.exit('torch' in sys.modules)"]
    ).returncode


def test_a_record_at_which_it_dies_is_bad_and_the_others_are_not(shared):
    pixels = random_images(3)
    piece = shared.allocate((3, 8, 8, 3))
    with DecodeWorker(shared) as decoder:
        reasons, _ = decoder.decode(
            [encode_image(pixels[0]), cast(Any, Fatal()), encode_image(pixels[2])], [False] * 3, piece, 0
        )
    assert reasons == [None, "decoder crashed on this image (status 7)", None]
    assert np.array_equal(piece.array[[0, 2]], pixels[[0, 2]])


def test_it_ends_when_its_owner_is_killed():
    owns = (
        "import time\n"
        "from paragan.data.loader.decode_worker import DecodeWorker\n"
        "from paragan.data.loader.shared_memory import SharedArena\n"
        "one = DecodeWorker(SharedArena()); print(one._start_worker().pid, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", owns], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as expected:
        child = int(expected.readline())
    os.kill(child, signal.SIGSTOP)  # it cannot even notice
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 10
    while _lives(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_modules_of_the_working_folder_are_not_imported(shared, tmp_path, monkeypatch):
    (tmp_path / "struct.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    with DecodeWorker(shared) as decoder:
        assert decoder.decode([encode_image(random_images(1)[0])], [False], shared.allocate((1, 8, 8, 3)), 0)[0] == [
            None
        ]


def test_one_that_is_killed_or_cannot_start_blames_no_image(shared, sets, monkeypatch):
    image, piece, start = encode_image(random_images(1)[0]), shared.allocate((1, 8, 8, 3)), DecodeWorker._start_worker

    def doomed(self):
        child = start(self)
        child.kill()
        return child

    monkeypatch.setattr(decoders, "RETRY_DELAYS_S", (0.0, 0.0))
    with DecodeWorker(shared) as decoder, monkeypatch.context() as patch:
        patch.setattr(DecodeWorker, "_start_worker", doomed)
        with advises(
            "data: a decode process was killed 2 times: is memory short? "
            "Use fewer --data.prefetch.workers, or --data.prefetch.worker_type=threads",
            RunError,
        ):
            decoder.decode([image], [False], piece, 0)
        threads, reasons = _batches(sets / "folder", 1, worker_type="threads")
        assert (len(threads), reasons) == (1, {})
    for program, message_of in (("/nowhere/python", "cannot be started .*nowhere"), ("/bin/false", "ready .status 1.")):
        monkeypatch.setattr(sys, "executable", program)
        with (
            DecodeWorker(shared) as decoder,
            pytest.raises(RunError, match=f"{message_of}.*: --data.prefetch.worker_type=threads needs"),
        ):
            decoder.decode([image], [False], piece, 0)


def test_one_that_hangs_is_replaced(shared, monkeypatch):
    monkeypatch.setattr(decoders, "REPLY_TIMEOUT_S", 0.0)
    monkeypatch.setattr(decoders, "EXIT_TIMEOUT_S", 0.1)
    image, piece = encode_image(random_images(1)[0]), shared.allocate((1, 8, 8, 3))
    with DecodeWorker(shared) as decoder:
        for _ in range(2):
            assert decoder.decode([image], [False], piece, 0)[0] == [None]
            assert decoder._child is not None
            os.kill(decoder._child.pid, signal.SIGSTOP)


def test_released_memory_is_reused(shared):
    pieces = [shared.allocate((64, 4096)) for _ in range(6)]
    for piece in pieces:
        piece.array[:] = 1
    held = os.fstat(shared.fd).st_blocks
    for piece in pieces:
        shared.release(piece)
    assert os.fstat(shared.fd).st_blocks <= held * SPARE_BLOCKS / len(pieces)
    assert shared.allocate((64, 4096)).offset == pieces[-1].offset
    assert {shared.allocate((64, 4096)).offset for _ in range(5)} == {piece.offset for piece in pieces[:-1]}
    assert AttachedArena(shared.fd).view(pieces[-1].offset, (2, 3)).tolist() == [[1] * 3] * 2


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A folder of 40 images."""
    root = tmp_path_factory.mktemp("sets")
    for index, pixels in enumerate(random_images(40, 16, seed=3)):
        folder = root / "folder" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{index:02d}.{'png' if index % 3 else 'jpg'}")
    return root


@contextmanager
def _reading(where: Path, **feed: Any) -> Iterator[PrefetchPipeline]:
    images = load_data(str(where), resolution=16, channels=3, cache="stream", max_bad_fraction=0.5).images
    assert isinstance(images, StreamingImages)
    rng = np.random.default_rng(1)
    plan = (BatchIndices(rng.permutation(40)[:37], rng.random(37) < 0.5) for _ in range(10**6))
    pipeline = PrefetchPipeline(images, plan, PrefetchOptions(**feed))
    try:
        yield pipeline
    finally:
        pipeline.close()


def _batches(where: Path, count: int, **feed: Any) -> tuple[list[np.ndarray], dict[int, str]]:
    with _reading(where, **feed) as pipeline:
        return [pipeline.next_batch().copy() for _ in range(count)], pipeline.images.bad_samples.reasons


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("kind", ["folder", "zip", "tars"])
def test_processes_make_the_bits_that_threads_make(sets, tmp_path, kind):
    where = tmp_path / "folder"
    if kind != "folder":
        where = tmp_path / {"zip": "set.zip", "tars": "tars"}[kind]
        subprocess.run(
            [sys.executable, "-m", "paragan", "data", "convert", str(sets / "folder"), str(where), "--to", kind],
            check=True,
        )
    else:
        shutil.copytree(sets / "folder", where)
        (where / "a" / "02.png").write_bytes(b"\x89PNG")
    threads, processes = (_batches(where, 6, worker_type=kind) for kind in ("threads", "processes"))
    assert all(map(np.array_equal, *(result[0] for result in (threads, processes))))
    assert threads[1] == processes[1]
    assert len(threads[1]) == (kind == "folder")


def test_a_decoder_that_is_killed_is_replaced(sets):
    target, _ = _batches(sets / "folder", 30, worker_type="threads")
    with _reading(sets / "folder", workers=1, batches=1, worker_type="processes") as pipeline:
        for count, batch in enumerate(target):
            assert np.array_equal(pipeline.next_batch(), batch)
            if count in (3, 9):
                for child in _children():
                    os.kill(child, signal.SIGKILL)


def _children() -> list[int]:
    """The processes that decode for this one."""
    result = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [pid for path in result for pid in path.read_text().split()]
    return [
        int(pid) for pid in pids if b"paragan.data.loader.decode_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_the_tuner_turns_to_processes_where_small_near_images_are_waited_for():
    most, least = PipelineKnobs(2, 0, 20, 1), PipelineKnobs(1, 0, 2, 0)
    waits = WindowStats(
        0.5, wait_s=0.3, images=5000, batches=50, fetch_s=2e-5, fetch_p90_s=3e-5, decode_s=5e-5, ready_batches=0
    )

    def observed(workers, window, most=most):
        return tune(TunerState(workers), window, most, least).knobs

    assert observed(PipelineKnobs(1, 0, 4), waits) == PipelineKnobs(2, 0, 4)  # first the threads that may be
    assert observed(PipelineKnobs(2, 0, 4), waits) == PipelineKnobs(2, 0, 4, 1)
    assert observed(
        PipelineKnobs(2, 0, 4, 1), WindowStats(0.5, 0, 500, 5, 2e-5, 3e-5, 5e-5, 4)
    ).use_processes  # and stays with them
    for other in ({"decode_s": 1e-3}, {"decode_s": 0.0}, {"wait_s": 0.0}, {"fetch_s": 0.01}):
        assert not observed(PipelineKnobs(2, 0, 4), WindowStats(**{**vars(waits), **other})).use_processes
    assert not observed(PipelineKnobs(2, 0, 4), waits, PipelineKnobs(2, 0, 20, 0)).use_processes


def test_system_errors_are_not_blamed_on_an_image(shared, tmp_path):
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")  # ELOOP is about this file alone
    piece = shared.allocate((1, 8, 8, 3))
    with DecodeWorker(shared, tmp_path) as decoder:
        reasons, _ = decoder.decode([("loop.png", 0, None, None)], [False], piece, 0)
        assert reasons[0] is not None
        assert "symbolic links" in reasons[0]
        child = decoder._child
        assert child is not None
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (3, 3))
        with pytest.raises(RunError, match=r"loop.png cannot be read: Too many open files .tried 4 times.: check"):
            decoder.decode([("loop.png", 0, None, None)], [False], piece, 0)
