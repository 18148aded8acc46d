"""Size, delta and non-finite numbers of every wire, and compiled kernels compared with the reference."""

from __future__ import annotations

import hashlib

import pytest
import torch

import standin
from advice import advises
from paragan.comm.compression import block_quantizer, native_kernels
from paragan.comm.compression.compressors import BF16, FP16, QSGD, Exact, Int2, Int4, Int8, RandomK, Sign, TopK
from paragan.comm.compression.elias_fano import decode_positions, encode_positions, position_bytes
from paragan.config.run import Run
from paragan.core.errors import UsageError
from paragan.core.schema import from_dict, from_yaml, to_dict, to_yaml

USER_WIRE = "examples.own_wire:Ternary"  # a user-defined compressor


def parse_wire(wire):
    return from_dict(Run, {"strategy": {"name": "sync", "wire": wire}}).strategy.wire


WIRES = {
    "exact": Exact(),
    "bf16": BF16(),
    "fp16": FP16(),
    "int8": Int8(),
    "int8 stochastic": Int8(rounding="stochastic"),
    "int8 block 64": Int8(block=64),
    "int4": Int4(),
    "int4 stochastic": Int4(rounding="stochastic"),
    "int2": Int2(),
    "qsgd": QSGD(),
    "qsgd 20": QSGD(levels=20),
    "qsgd 7": QSGD(levels=7),
    "qsgd 1": QSGD(levels=1),
    "sign": Sign(),
    "topk": TopK(),
    "topk all": TopK(fraction=1.0),
    "topk, 8 bits": TopK(fraction=0.1, bits=8),
    "topk, 4 bits": TopK(fraction=0.02, bits=4),
    "topk, 2 bits": TopK(fraction=0.1, bits=2),
    "randomk": RandomK(fraction=0.1),
    "own": parse_wire(USER_WIRE),
}
SIZES = (1, 2, 63, 64, 65, 1000, 4097)
every_wire = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)


def vectors(n):
    g = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=g)
    yield "normal", x
    yield "sparse", x * (torch.rand(n, generator=g) < 0.03)
    yield "constant", torch.full((n,), -3.3)
    yield "one large", x * torch.where(torch.arange(n) == n // 2, 1e4, 1.0)
    yield "between levels", torch.where(torch.arange(n) == 0, 1.0, 1 / 16)  # of int4
    yield "opposite", torch.where(torch.arange(n) % 3 == 0, 2.0, -2.0)  # one of the two has no level
    yield "denormal", x * 1e-40
    yield "huge", x * 1e36
    yield "zero", torch.zeros(n)
    yield "minus zero", -torch.zeros(n)


def roundtrip(wire, x, seed=5):
    data = torch.full((wire.nbytes(len(x)),), 99, dtype=torch.uint8)
    out = torch.full_like(x, 99.0)
    wire.encode(x, data, seed)
    wire.decode(data, out)
    return out


@every_wire
@pytest.mark.parametrize("n", SIZES)
def test_delta_holds(wire, n):
    """E|Q(v) - v|^2 <= (1 - delta) |v|^2 for every vector; in the mean over seeds if the wire is random."""
    for kind, x in vectors(n):
        if isinstance(wire, BF16 | FP16) and kind in ("denormal", "huge"):
            continue  # delta is for normal numbers
        error = sum((roundtrip(wire, x, seed).double() - x).square().sum() for seed in range(40)) / 40
        norm = x.double().square().sum()
        is_random = isinstance(wire, QSGD | RandomK) or getattr(wire, "rounding", "") == "stochastic"
        bound = (1 - wire.delta(n)) * norm * (1.5 if is_random else 1.0)  # of a mean over 40 seeds
        assert wire.delta(n) == 0 or error <= bound + 1e-6 * norm, kind


@every_wire
def test_messages_on_a_device_are_those_of_the_cpu_and_no_host_waits(wire):
    device = standin.install()
    for kind, x in [*vectors(300), ("one number", torch.tensor([0.3]))]:
        data = torch.full((wire.nbytes(len(x)),), 99, dtype=torch.uint8)
        out = torch.full_like(x, 99.0)
        x_there, data_there, out_there = (t.to(device) for t in (x, data, out))
        with standin.recording() as syncs:
            wire.encode(x_there, data_there, 5)
        assert not syncs
        with standin.recording() as syncs:
            wire.decode(data_there, out_there)
        assert len(syncs) == isinstance(wire, RandomK)  # whose positions the host draws
        wire.encode(x, data, 5)
        wire.decode(data, out)
        assert torch.equal(data_there.cpu(), data), kind
        assert torch.equal(out_there.cpu().view(torch.int32), out.view(torch.int32)), kind


@every_wire
def test_roundtrip_is_deterministic_per_seed(wire):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(roundtrip(wire, x, 3), roundtrip(wire, x, 3))


@pytest.mark.parametrize("wire", [Int8(rounding="stochastic"), Int4(rounding="stochastic"), QSGD(levels=7)])
def test_stochastic_rounding_is_unbiased(wire):
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))
    mean = sum(roundtrip(wire, x, seed).double() for seed in range(4000)) / 4000
    step = 16.0 / 7 if isinstance(wire, QSGD) else 4.0 / wire.max_level
    assert (mean - x).abs().max() < 5 * step / 2 / 4000**0.5


@every_wire
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_numbers_remain_nonfinite(wire, bad):
    for n in (1, 300, 1000):
        for position in {0, n // 2, n - 1}:
            x = torch.randn(n)
            x[position] = bad
            assert not roundtrip(wire, x).isfinite().all()


def test_float16_does_not_clip():
    assert roundtrip(FP16(), torch.tensor([1e5, 1.0])).isinf()[0]


@every_wire
def test_message_sizes_are_aligned(wire):
    word = 4 if isinstance(wire, Exact | TopK | RandomK) else 2
    assert all(wire.nbytes(n) % word == 0 for n in range(1, 200))


@pytest.mark.parametrize(
    ("wire", "bits"), [(Int8(), 8.06), (Int4(), 4.25), (Int2(), 2.25), (Sign(), 1.06), (TopK(), 0.41)]
)
def test_bits_per_number(wire, bits):
    assert 8 * wire.nbytes(1 << 20) / (1 << 20) == pytest.approx(bits, abs=0.01)


@pytest.mark.parametrize(("bits", "max_level"), [(8, 128), (8, 127), (8, 100), (4, 8), (4, 7), (2, 2), (2, 1)])
@pytest.mark.parametrize("rule", ["signed_absmax", "absmax", "norm"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_compiled_levels_equal_the_reference(bits, max_level, rule, stochastic):
    assert native_kernels.load_kernels() is not None, "no C compiler here: compressors would run ten times slower"
    for n in (1, 255, 256, 5000):
        for kind, x in vectors(n):
            nbytes = block_quantizer.num_blocks(n, 256) * block_quantizer.encoded_block_bytes(256, bits)
            codes = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
            levels = {"block": 256, "bits": bits, "max_level": max_level}
            settings = levels | {"rule": rule, "stochastic": stochastic, "seed": 77}
            block_quantizer.encode_levels(x, codes[0], **settings)
            block_quantizer.reference_encode_levels(x, codes[1], **settings)
            assert torch.equal(*codes), kind
            compiled, reference = torch.empty(n), torch.empty(n)
            block_quantizer.decode_levels(codes[0], compiled, **levels)
            block_quantizer.reference_decode_levels(codes[0], reference, **levels)
            assert torch.equal(compiled, reference), kind


def test_compiled_signs_equal_the_reference():
    for n in (1, 255, 256, 5000):
        for kind, x in vectors(n):
            nbytes = block_quantizer.num_blocks(n, 256) * block_quantizer.encoded_block_bytes(256, 1)
            codes = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
            block_quantizer.encode_signs(x, codes[0], block=256)
            block_quantizer.reference_encode_signs(x, codes[1], 256)
            assert torch.equal(*codes), kind
            compiled, reference = torch.empty(n), torch.empty(n)
            block_quantizer.decode_signs(codes[0], compiled, block=256)
            block_quantizer.reference_decode_signs(codes[0], reference, 256)
            assert torch.equal(compiled, reference), kind


def test_without_a_compiler_one_warning_and_same_result(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    native_kernels.load_kernels.cache_clear()
    try:
        x = torch.randn(1000)
        with pytest.warns(UserWarning, match="plain PyTorch.*no C compiler") as warnings:
            reference, *_ = [roundtrip(Int8(), x) for _ in range(3)]
        assert len(warnings) == 1
    finally:
        monkeypatch.undo()
        native_kernels.load_kernels.cache_clear()
    assert torch.equal(reference, roundtrip(Int8(), x))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (10, 1), (10, 10), (1000, 7), (1 << 20, 1000), (129, 128)])
def test_positions_are_restored_from_few_bytes(n, k):
    positions = torch.randperm(n, generator=torch.Generator().manual_seed(k))[:k].sort().values
    data = torch.zeros(position_bytes(n, k), dtype=torch.uint8)
    encode_positions(positions, n, data)
    assert torch.equal(decode_positions(data, n, k), positions)
    bits = torch.tensor(n / k).log2() + 2
    assert 8 * len(data) <= k * bits + 16


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ("int9", "there is no int9; did you mean int8"),
        ({"name": "int8", "block": 100}, "strategy.wire.block=100"),
        ({"name": "int8", "block": 0}, "strategy.wire.block=0"),
        ({"name": "qsgd", "levels": 128}, "strategy.wire.levels=128"),
        ({"name": "qsgd", "levels": 0}, "strategy.wire.levels=0"),
        ({"name": "topk", "fraction": 0}, "strategy.wire.fraction=0"),
        ({"name": "randomk", "fraction": 1.5}, "strategy.wire.fraction=1.5"),
        ({"name": "int4", "rounding": "up"}, "strategy.wire.rounding=up"),
        ({"name": "sign", "levels": 3}, "there is no field strategy.wire.levels"),
        ({"name": USER_WIRE, "levels": 3}, "there is no field levels; there are: threshold"),
        ({"name": USER_WIRE, "threshold": "high"}, "threshold=high"),
        ("examples.own_wire:Binary", "examples.own_wire:Binary: module .*own_wire.py. has no attribute 'Binary'"),
        ("nowhere:Ternary", "nowhere:Ternary: No module named 'nowhere'"),
        ("os:system", "os:system: is not a config class"),
        ("paragan.comm.compression.compressors:", "Use module:Class, and start in the folder"),
        (
            "paragan.config.sections:DataOptions",
            "paragan.config.sections:DataOptions: has no name, lossy, feedback, nbytes, delta, enc",
        ),
    ],
)
def test_invalid_wires_are_named(wire, message):
    with pytest.raises(UsageError, match=message):
        parse_wire(wire)


def test_user_wire_survives_the_config_file():
    wire = parse_wire({"name": USER_WIRE, "threshold": 0.5})
    run = from_dict(Run, {"strategy": {"name": "quantized", "wire": to_dict(wire)}})
    assert run.strategy.wire == wire
    assert to_dict(run)["strategy"]["wire"] == {"name": USER_WIRE, "threshold": 0.5}
    assert from_dict(Run, from_yaml(to_yaml(run), "run")) == run


USER_WIRE_SOURCE = """
from typing import ClassVar
from paragan.core.schema import config_class

@config_class
class W:
    name: str = ""
    lossy: ClassVar[bool] = True
    feedback: ClassVar[float] = 1.0
    def nbytes(self, n): return 4 * n
    def delta(self, n): return 1.0
    def encode(self, x, out, seed): out.copy_(x.view(out.dtype))
    def decode(self, data, out): out.copy_(data.view(out.dtype))
"""


@pytest.mark.parametrize(
    ("module", "before", "after", "message"),
    [
        ("fine", "", "", ""),
        ("raises", "out.copy_(x", "boom(x", "raises:W: NameError when it was tried: name 'boom'"),
        ("lost", "out.copy_(data.view(out.dtype))", "None", "lost:W: decode.* of 1000 finite numbers is not finite"),
        ("syntax", "@config_class", "@@", "syntax:W: "),
        ("leaves", "@config_class", "raise SystemExit(7)", "leaves:W: 7. Use module:Class"),
        ("bare", "@config_class", "", "bare:W: is not a config class"),
    ],
)
def test_user_wire_is_checked_when_the_config_is_read(tmp_path, monkeypatch, module, before, after, message):
    module = f"user_{module}"
    (tmp_path / f"{module}.py").write_text(USER_WIRE_SOURCE.replace(before, after) if before else USER_WIRE_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    if not message:
        assert parse_wire(f"{module}:W").nbytes(3) == 12
        return
    with pytest.raises(UsageError, match=message):
        parse_wire(f"{module}:W")


@pytest.mark.parametrize(
    ("module", "before", "after", "refusal", "advised"),
    [
        (
            "odd",
            "4 * n",
            "4 * n + 1",
            advises("odd:W: nbytes(1000): returned 4001. Return a positive int, a multiple of 2"),
            ["4 * n"],
        ),
        (
            "none",
            "4 * n",
            "None",
            advises("none:W: nbytes(1000): returned None. Return a positive int, a multiple of 2"),
            ["4 * n"],
        ),
        (
            "eager",
            "= 1.0",
            "= -3",
            advises("eager:W: feedback=-3: out of range. Use a number from 0 to 1"),
            ["= 0", "= 0.5", "= 1"],
        ),
    ],
    ids=["odd", "none", "eager"],
)
def test_a_user_wire_is_accepted_as_advised(tmp_path, monkeypatch, module, before, after, refusal, advised):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"user_{module}.py").write_text(USER_WIRE_SOURCE.replace(before, after))
    with refusal:
        parse_wire(f"user_{module}:W")
    for number, text in enumerate(advised):
        (tmp_path / f"user_{module}_{number}.py").write_text(USER_WIRE_SOURCE.replace(before, text))
        assert parse_wire(f"user_{module}_{number}:W").nbytes(3) == 12


def test_damaged_library_is_recompiled(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "cc -pipe")  # a compiler may have arguments
    try:
        native_kernels.load_kernels.cache_clear()
        assert native_kernels.load_kernels() is not None
        (library,) = (tmp_path / "paragan" / "kernels").glob("*.so")
        assert [path.stat().st_mode & 0o777 for path in (library, library.parent)] == [0o700, 0o700]
        intact = library.read_bytes()
        for damaged in (intact[:3000], b"", intact[:-1] + b"x"):
            library.unlink()  # it is in use: write a new file, as another process would find it
            library.write_bytes(damaged)
            native_kernels.load_kernels.cache_clear()
            assert native_kernels.load_kernels() is not None
            assert len(library.read_bytes()) == len(intact)
    finally:
        monkeypatch.undo()
        native_kernels.load_kernels.cache_clear()


def test_a_library_that_others_could_have_written_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "paragan" / "kernels"
    try:
        native_kernels.load_kernels.cache_clear()
        assert native_kernels.load_kernels() is not None
        (library,) = folder.glob("*.so")
        intact = library.read_bytes()
        foreign = b"not a library"
        library.unlink()
        library.write_bytes(foreign + hashlib.sha256(foreign).digest())  # its checksum is right, loading it would fail
        library.chmod(0o666)
        native_kernels.load_kernels.cache_clear()
        assert native_kernels.load_kernels() is not None
        assert len(library.read_bytes()) == len(intact)
        folder.chmod(0o777)
        native_kernels.load_kernels.cache_clear()
        with pytest.warns(UserWarning, match="can be written by other users: chmod 700 it"):
            assert native_kernels.load_kernels() is None
    finally:
        monkeypatch.undo()
        native_kernels.load_kernels.cache_clear()


def test_compiled_kernels_serve_all_sizes_and_seeds_of_a_wire():
    """The block is a constant in them, and a size or seed is not, so none is compiled again in each step."""
    graphs = []

    def count(graph, _):
        graphs.append([n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"])
        return graph.forward

    wire = Int8(rounding="stochastic")
    fixed = {"block": 256, "bits": 8, "max_level": wire.max_level, "rule": "absmax", "stochastic": True}
    function = block_quantizer.FixedArguments(block_quantizer.reference_encode_levels, **fixed)
    compiled = torch.compile(function, dynamic=True, backend=count)
    for n, seed in ((1000, 5), (5000, 9), (70_000, 12)):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n))
        data, expected = (torch.empty(wire.nbytes(n), dtype=torch.uint8) for _ in range(2))
        compiled(x, data, seed=seed)
        wire.encode(x, expected, seed)
        assert torch.equal(data, expected)
    assert len(graphs) == 1
    variables = [value for value in graphs[0] if not isinstance(value, torch.Tensor)]
    assert len(variables) == 3  # numbers, bytes of the message, seed
