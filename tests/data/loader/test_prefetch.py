"""The pipeline: what it gives depends on the plan alone, whatever threads, storage and damage do."""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from advice import advises
from paragan.core.errors import RunError
from paragan.core.image_shape import ImageSize
from paragan.data.bad_samples import BadSamples
from paragan.data.dataset import load_data
from paragan.data.lanes import LaneLoader
from paragan.data.loader.memory_budget import CHUNK_IMAGES
from paragan.data.loader.prefetch import BatchIndices, PrefetchOptions, PrefetchPipeline
from paragan.data.source import DecodeError
from paragan.data.streaming import StreamingImages

RNG = np.random.default_rng(5)
PIXELS = RNG.integers(0, 256, (40, 8, 8, 3), np.uint8)
LABELS = np.arange(40) % 3


class Memory:
    """A source of pixels that may be far, slow, damaged and out of reach."""

    location, notes, array = "memory", (), None
    labels, classes = LABELS, ("a", "b", "c")

    def __init__(self, is_local=True, delay=lambda index: 0.0, bad=(), lost=()):
        self.is_local, self.delay, self.bad, self.lost = is_local, delay, bad, lost
        self.running = self.most = 0
        self._lock = threading.Lock()

    def __len__(self):
        return len(PIXELS)

    def read(self, index):
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(self.delay(index))
        with self._lock:
            self.running -= 1
        if index in self.bad:
            raise DecodeError("planted")
        if index in self.lost:
            raise RunError(f"image {index} is out of reach")
        return PIXELS[index]

    def sample_name(self, index):
        return f"image {index}"

    def fingerprint_parts(self):
        yield PIXELS.tobytes()


def streamed(source, max_fraction=0.5):
    return StreamingImages(
        source, BadSamples(LABELS, len(source), source.sample_name, max_fraction), ImageSize(8, 8), 3
    )


def plan(size=12, flips=False, seed=0):
    rng = np.random.default_rng(seed)
    while True:
        yield BatchIndices(rng.permutation(len(PIXELS))[:size], rng.random(size) < 0.5 if flips else None)


def expected(flips=False):
    for order in plan(flips=flips):
        pixels = PIXELS[order.index]
        if order.flip is not None:
            pixels[order.flip] = pixels[order.flip, :, ::-1]
        yield pixels


@pytest.fixture
def opened():
    pipelines = []

    def make(*args, **options):
        pipelines.append(PrefetchPipeline(*args, **options))
        return pipelines[-1]

    yield make
    for pipeline in pipelines:
        pipeline.close()
    deadline = time.monotonic() + 10
    while any(t.name == "paragan data" for t in threading.enumerate()):
        assert time.monotonic() < deadline, "threads of a closed pipeline stay"
        time.sleep(0.01)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize(
    "feed",
    [
        PrefetchOptions(),
        PrefetchOptions(workers=3, concurrent_requests=9, batches=7),
        PrefetchOptions(workers=1, concurrent_requests=1, batches=1),
    ],
)
def test_batches_come_in_the_order_of_the_plan(opened, near, feed):
    source = Memory(near, delay=lambda index: 0.002 * (index % 5 == 0))
    pipeline = opened(streamed(source), plan(flips=True), feed)
    for target in itertools.islice(expected(flips=True), 40):
        assert np.array_equal(pipeline.next_batch(), target)


def test_the_requested_number_of_requests_is_in_flight(opened):
    source = Memory(is_local=False, delay=lambda index: 0.01)
    pipeline = opened(streamed(source), plan(), PrefetchOptions(workers=1, concurrent_requests=20, batches=8))
    for _ in range(10):
        pipeline.next_batch()
    assert 15 <= source.most <= 20


def test_slow_remote_data_adds_workers_until_the_step_does_not_wait(opened):
    source = Memory(is_local=False, delay=lambda index: 0.05)
    pipeline = opened(streamed(source), plan(), PrefetchOptions(batches=30))
    before = pipeline.tuner_state.knobs.concurrent_requests
    deadline, waited = time.monotonic() + 30, 1.0
    while waited > 0.002 and time.monotonic() < deadline:
        time.sleep(0.02)  # 600 images a second: 30 requests at once
        start = time.perf_counter()
        pipeline.next_batch()
        waited = 0.9 * waited + 0.1 * (time.perf_counter() - start)
    assert waited <= 0.002
    assert pipeline.tuner_state.knobs.concurrent_requests > before
    assert any("the step waited" in line for line in pipeline.pop_decisions())
    assert pipeline.pop_decisions() == []


def test_a_bad_image_is_replaced_by_the_next_of_its_class(opened):
    bad = (4, 7, 10)  # 1, 4, 7, 10, 13 are of one class
    for near in (True, False):
        images = streamed(Memory(near, bad=bad))
        pipeline = opened(images, iter(BatchIndices(np.array([at, 0, 4])) for at in itertools.cycle((1, 4, 7, 10))))
        for stand_in in (1, 13, 13, 13):
            assert np.array_equal(pipeline.next_batch(), PIXELS[[stand_in, 0, 13]])
        assert sorted(images.bad_samples.reasons) == [4, 7, 10]
        assert images.bad_samples.to_lines()[0] == "image 4\tplanted"


def test_replacements_of_bad_images_wrap_around_and_are_deterministic():
    images = streamed(Memory(bad=(37, 38, 39)))
    assert np.array_equal(images[[37, 38, 39]], PIXELS[[1, 2, 0]])
    assert np.array_equal(images[37], PIXELS[1])
    subset = images.subset(np.arange(36, 40))
    assert np.array_equal(subset[:], PIXELS[[36, 1, 2, 0]])


def test_too_many_bad_images_end_the_run_with_their_names(opened):
    images = streamed(Memory(bad=(3, 5, 8, 9)), max_fraction=0.05)
    pipeline = opened(images, plan())
    with pytest.raises(RunError, match=r"image \d cannot be decoded: planted \(and 2 more of 40 images\).*max_bad_f"):
        [pipeline.next_batch() for _ in range(20)]


def test_a_class_without_a_good_image_ends_the_run():
    images = streamed(Memory(bad=range(0, 40, 3)), max_fraction=0.9)
    with pytest.raises(RunError, match="no image of its class is good"):
        images[0]


@pytest.mark.parametrize("near", [True, False])
def test_an_unreachable_image_ends_the_run_after_the_images_before_it(opened, near):
    pipeline = opened(
        streamed(Memory(near, lost=(20,))), iter(BatchIndices(np.arange(at, at + 4)) for at in range(0, 40, 4))
    )
    for at in range(0, 20, 4):
        assert np.array_equal(pipeline.next_batch(), PIXELS[at : at + 4])
    for _ in range(2):
        with pytest.raises(RunError, match="image 20 is out of reach"):
            pipeline.next_batch()


def test_memory_stays_below_the_cap(opened):
    cap = 60 * PIXELS[:12].nbytes / 2**30
    source = Memory(is_local=False, delay=lambda index: 0.001)
    pipeline = opened(streamed(source), plan(), PrefetchOptions(memory_gb=cap, concurrent_requests=64))
    for _ in range(3):
        pipeline.tuner_state = pipeline.tuner_state.__class__(pipeline.tuner_state.knobs.__class__(1, 64, 1000))
        for _ in range(100):
            pipeline.next_batch()
            assert pipeline.memory_budget.used_bytes <= cap * 2**30
    assert pipeline.memory_budget.peak_bytes > 0.3 * cap * 2**30
    with advises("data.prefetch.memory_gb=1e-06: does not hold two batches ahead. Use 0.001 or more"):
        PrefetchPipeline(streamed(source), plan(), PrefetchOptions(memory_gb=1e-6))
    assert opened(streamed(source), plan(), PrefetchOptions(memory_gb=0.001)).next_batch().shape == (12, 8, 8, 3)


# Lanes over a pipeline ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """150 JPEGs and PNGs of three classes, of which two are damaged."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for index in range(150):
        folder = root / "abc"[index % 3]
        folder.mkdir(exist_ok=True)
        size = (16, 16) if index % 4 else (20, 25)
        image = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))
        image.save(folder / f"{index:03d}.{'png' if index % 5 == 0 else 'jpg'}")
    for name in ("a/030.png", "b/031.jpg"):
        (root / name).write_bytes((root / name).read_bytes()[:200])
    return root


def lanes(images, owned=tuple(range(8)), start=0, merge=0):
    return LaneLoader(
        images.images,
        images.labels,
        local_lanes=owned,
        num_lanes=8,
        batch_size=64,
        seed=3,
        start=start,
        mirror=True,
        lanes_per_pass=merge,
    )


def read_batches(source, count):
    """[count] images and labels of whole positions, the pipeline's memory copied."""
    received = [
        [(worker.images.clone(), worker.labels.clone()) for worker in source.next_micro_batches()] for _ in range(count)
    ]
    source.close()
    return [tuple(torch.cat(parts) for parts in zip(*threads, strict=True)) for threads in received]


def same(one, other):
    return all(torch.equal(a, b) for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=True))


def test_streamed_and_held_images_are_the_same_to_the_bit_damage_included(photos):
    held = load_data(str(photos), resolution=16, max_bad_fraction=0.02)
    stream = load_data(str(photos), resolution=16, max_bad_fraction=0.02, cache="stream")
    assert held.in_memory
    assert not stream.in_memory
    assert held.images.shape == stream.images.shape
    assert np.array_equal(held.images, stream.images[:])
    assert same(read_batches(lanes(held), 7), read_batches(lanes(stream), 7))
    assert sorted(held.bad_samples.reasons) == sorted(stream.bad_samples.reasons)
    assert "2 cannot be decoded" in held.describe()


@pytest.mark.parametrize("merge", [0, 3])
def test_a_resume_in_the_middle_of_an_epoch_goes_on_exactly(photos, merge):
    """150 images, batches of 64: epochs end inside batches; ranks 1, then 4, then 2."""
    stream = load_data(str(photos), resolution=16, max_bad_fraction=0.02, cache="stream")
    full = read_batches(lanes(stream), 12)

    def ranks(owned, start, count):
        parts = [read_batches(lanes(stream, private, start * 64, merge), count) for private in owned]
        return [tuple(torch.cat(parts) for parts in zip(*at, strict=True)) for at in zip(*parts, strict=True)]

    four, two = [(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert same(ranks([tuple(range(8))], 0, 3) + ranks(four, 3, 4) + ranks(two, 7, 5), full)


def test_closed_lanes_continue_where_they_stopped(photos):
    stream = load_data(str(photos), resolution=16, max_bad_fraction=0.02, cache="stream")
    source = lanes(stream)
    first = read_batches(source, 2)
    assert same(first + read_batches(source, 3), read_batches(lanes(stream), 5))


def test_of_one_class(photos):
    held = load_data(str(photos), resolution=16, max_bad_fraction=0.02).only_class(1)
    stream = load_data(str(photos), resolution=16, max_bad_fraction=0.02, cache="stream").only_class(1)
    assert len(stream.images) == 50
    assert np.array_equal(held.images, stream.images[:])
    assert (
        stream.fingerprint != load_data(str(photos), resolution=16, cache="stream", max_bad_fraction=0.02).fingerprint
    )


def test_the_identity_of_a_stream(photos, tmp_path):
    def fingerprint(**options):
        return load_data(str(photos), **{"resolution": 16, "cache": "stream"} | options).fingerprint

    first = fingerprint()
    assert first == fingerprint()
    assert len({first, fingerprint(resolution=8), fingerprint(channels=1), fingerprint(labels=False)}) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("merge", [0, 3])
def test_batches_copied_to_a_gpu_equal_those_on_the_cpu(photos, merge):
    """The step is slow in turn, so that memory which is used again too early is caught."""
    stream = load_data(str(photos), resolution=16, max_bad_fraction=0.02, cache="stream")
    options = {
        "local_lanes": tuple(range(8)),
        "num_lanes": 8,
        "batch_size": 64,
        "seed": 3,
        "mirror": True,
        "lanes_per_pass": merge,
    }
    remote = LaneLoader(stream.images, stream.labels, device=torch.device("cuda"), **options)
    received = []
    for _ in range(30):
        threads = remote.next_micro_batches()
        torch.cuda._sleep(5_000_000)
        received.append([(worker.images + 0, worker.labels) for worker in threads])
    remote.close()
    local = LaneLoader(stream.images, stream.labels, **options)
    for paragan_result in received:
        for (images, labels), worker in zip(paragan_result, local.next_micro_batches(), strict=True):
            assert torch.allclose(images.cpu(), worker.images, atol=1e-6)
            assert torch.equal(labels.cpu(), worker.labels)
    local.close()


class Large(Memory):
    """Records that are far larger than the images they become."""

    record = RNG.integers(0, 256, (400, 400, 3), np.uint8)

    def read(self, index):
        super().read(index)
        return self.record


def test_encoded_images_stay_below_the_cap_from_the_first_on(opened):
    """Before the size of any is known, and however many requests may be under way."""
    most = 0
    pipeline = opened(
        streamed(Large(is_local=False)),
        plan(),
        PrefetchOptions(memory_gb=0.012, concurrent_requests=64, workers=1, batches=40),
    )
    for _ in range(20):
        pipeline.next_batch()
        most = max(most, pipeline.memory_budget.encoded_bytes)
    assert most <= 0.012 * 2**30 + CHUNK_IMAGES * Large.record.nbytes  # 480 images would be 230 MB


def test_depth_does_not_grow_beyond_the_memory_budget(opened):
    # 50 MB hold some 8 batches of such records, and 20,000 of their pixels
    delay_s = 0.001
    source = Large(is_local=False, delay=lambda index: delay_s)
    pipeline = opened(streamed(source), plan(), PrefetchOptions(memory_gb=0.05, concurrent_requests=64))

    def play_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            pipeline.next_batch()
            time.sleep(0.01)

    play_until(lambda: pipeline.tuner_state.baseline_latency_s > 0)
    delay_s = 20 * max(pipeline.tuner_state.baseline_latency_s, 0.001)
    play_until(lambda: pipeline.tuner_state.congested)
    for _ in range(100):
        pipeline.next_batch()
        time.sleep(0.01)
    assert not any("congestion" in line and "batches" in line for line in pipeline.pop_decisions())


def test_a_retry_after_an_error_gets_new_memory(opened):
    """What was lent is given back once, however often the next batch is asked for."""
    plan = (BatchIndices(np.arange(at, at + 4)) for at in itertools.chain((16, 20), itertools.repeat(24)))
    pipeline = opened(streamed(Memory(lost=(20,))), plan)
    pipeline.next_batch()
    for _ in range(3):
        with pytest.raises(RunError):
            pipeline.next_batch()
    assert len({block.offset for block in pipeline._arena._free}) == len(pipeline._arena._free)
