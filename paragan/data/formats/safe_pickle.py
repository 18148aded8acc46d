"""Pickles read without running anything of theirs: numbers, texts, lists, dicts and NumPy arrays, nothing else.

A pickle is a program. This one is looked through before it starts, opcode by opcode, and what it asks to be called is
answered with a thing that only remembers what it was called with.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np

_MAKERS = {
    ("numpy.core.multiarray", "_reconstruct"): "array",
    ("numpy._core.multiarray", "_reconstruct"): "array",
    ("numpy.core.numeric", "_frombuffer"): "buffer",
    ("numpy._core.numeric", "_frombuffer"): "buffer",
    ("numpy", "ndarray"): "",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "bytes",
    ("builtins", "bytearray"): "bytes",
    ("__builtin__", "bytearray"): "bytes",
}
# fmt: off
_OPCODES = {  # of protocol 2 and newer; those before it are programs in text
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4",
    "BINFLOAT", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
}
# fmt: on
_MOST = 5_000_000  # opcodes; CIFAR-100 takes half a million
_MOST_TUPLES = 1000  # within each other they could exhaust the C stack

# What Unpickler and genops raise on damaged pickles.
_DAMAGE = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError),
    *(MemoryError, OverflowError, RecursionError, ImportError),
)


class Refused(Exception):
    """A pickle that is damaged, or wants more than data."""


class _Inert:
    """Stands for a maker, and for what it made: only remembers."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...] = ()):
        self.kind, self.arguments, self.state = kind, arguments, None

    def __call__(self, *arguments: Any) -> _Inert:
        return _Inert(self.kind, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> _Inert:
        if (module, name) not in _MAKERS:
            raise Refused(f"it asks for {module}.{name}, which is not run: only lists, dicts and arrays are read")
        return _Inert(_MAKERS[module, name])


def unpickled(data: bytes) -> Any:
    """The plain data in a pickle; Python 2's texts as bytes; arrays yet to be made, by `array`. Raises `Refused`."""
    try:
        _look_through(data)
        return _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except _DAMAGE as error:
        raise Refused(f"it is no pickle, or a damaged one: {' '.join(str(error).split()) or 'it ends early'}") from None


def array(made: Any) -> np.ndarray:
    """The array of bytes or integers that a pickle holds. Raises `Refused`."""
    match made:
        case _Inert(kind="array", state=(_, tuple(shape), dtype, bool(fortran) | int(fortran), data)):
            return _assembled(data, dtype, shape, bool(fortran))
        case _Inert(kind="buffer", arguments=(data, dtype, tuple(shape), order)):
            return _assembled(data, dtype, shape, order in ("F", b"F"))
        case _:
            raise Refused("what should be an array is none")


def _look_through(data: bytes) -> None:
    tuples = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name not in _OPCODES:
            raise Refused(f"it uses {opcode.name}, which plain data does not")
        if count > _MOST:
            raise Refused(f"it takes more than {_MOST:,} steps")
        tuples += opcode.name.startswith("TUPLE")
        if tuples > _MOST_TUPLES:
            raise Refused("it holds more tuples than arrays need")
        if opcode.name == "LONG_BINPUT" and int(argument or 0) > count:
            raise Refused(
                "it remembers at a place that no writer would choose"
            )  # the reader would allocate up to there


def _assembled(data: Any, dtype: Any, shape: tuple[Any, ...], fortran: bool) -> np.ndarray:
    kind, raw = _dtype(dtype), _bytes(data)
    if not all(isinstance(side, int) and 0 <= side < 2**40 for side in shape) or len(shape) > 8:
        raise Refused("an array of an impossible shape")
    if math.prod(shape) * kind.itemsize != len(raw):
        raise Refused(f"an array of {len(raw):,} bytes, which is not {list(shape)} of {kind}")
    return np.frombuffer(raw, kind).reshape(shape, order="F" if fortran else "C")


def _dtype(made: Any) -> np.dtype:
    match made:
        case _Inert(kind="dtype", arguments=(bytes(code) | str(code), *_), state=state):
            text = code.decode("latin1") if isinstance(code, bytes) else code
            order = state[1] if isinstance(state, tuple) and len(state) > 1 else "|"
            big = order in (">", b">")
            if len(text) == 2 and text[0] in "iu" and text[1] in "1248":
                return np.dtype((">" if big else "<") + text)
            raise Refused(f"an array of {text[:20]!r}, wanted integers")
        case _:
            raise Refused("an array of no type")


def _bytes(made: Any) -> bytes:
    match made:
        case bytes() | bytearray():
            return bytes(made)
        case _Inert(kind="bytes", arguments=(str(text), "latin1" | "latin-1" | b"latin1" | b"latin-1")):
            return _latin(text)
        case _Inert(kind="bytes", arguments=(bytes(data),)):
            return data
        case str():
            return _latin(made)
        case _:
            raise Refused("an array without its bytes")


def _latin(text: str) -> bytes:
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        raise Refused("an array whose bytes are none") from None
