"""Read pickles without running code from them: numbers, strings, lists, dicts and NumPy arrays only.

A pickle is a program. Its opcodes are checked before it runs, and every function it calls is replaced by an object that
only records the call (`_RecordedCall`).
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np

_ALLOWED_CALLABLES = {
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
_OPCODES = {  # of protocol 2 and newer; older protocols are text
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4",
    "BINFLOAT", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
}
# fmt: on
_MAX_OPCODES = 5_000_000  # CIFAR-100 takes half a million
_MAX_TUPLES = 1000  # nested tuples could exhaust the C stack

# What Unpickler and genops raise on damaged pickles.
_CORRUPTION_ERRORS = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError),
    *(MemoryError, OverflowError, RecursionError, ImportError),
)


class UnsafePickleError(Exception):
    """A pickle that is damaged, or that contains more than data."""


class _RecordedCall:
    """Replaces a function, and the object that it would return: records arguments and state."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...] = ()):
        self.kind = kind
        self.arguments = arguments
        self.state = None

    def __call__(self, *arguments: Any) -> _RecordedCall:
        return _RecordedCall(self.kind, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> _RecordedCall:
        if (module, name) not in _ALLOWED_CALLABLES:
            raise UnsafePickleError(
                f"it calls {module}.{name}, which is not run: only lists, dicts and arrays are read"
            )
        return _RecordedCall(_ALLOWED_CALLABLES[module, name])


def safe_unpickle(data: bytes) -> Any:
    """Return the plain data in a pickle.

    Strings of Python 2 are bytes. Arrays are recorded calls, for `to_array`.

    Raises:
        UnsafePickleError: it is damaged, or contains more than data.
    """
    try:
        _check_opcodes(data)
        return _SafeUnpickler(io.BytesIO(data), encoding="bytes").load()
    except _CORRUPTION_ERRORS as error:
        raise UnsafePickleError(
            f"it is not a pickle, or is damaged: {' '.join(str(error).split()) or 'it ends early'}"
        ) from None


def to_array(value: Any) -> np.ndarray:
    """Return the array of integers in the result of `safe_unpickle`. Raises `UnsafePickleError` for other values."""
    match value:
        case _RecordedCall(kind="array", state=(_, tuple(shape), dtype, bool(fortran) | int(fortran), data)):
            return _build_array(data, dtype, shape, bool(fortran))
        case _RecordedCall(kind="buffer", arguments=(data, dtype, tuple(shape), order)):
            return _build_array(data, dtype, shape, order in ("F", b"F"))
        case _:
            raise UnsafePickleError("it is not an array")


def _check_opcodes(data: bytes) -> None:
    tuples = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name not in _OPCODES:
            raise UnsafePickleError(f"it uses {opcode.name}, which plain data does not")
        if count > _MAX_OPCODES:
            raise UnsafePickleError(f"it takes more than {_MAX_OPCODES:,} steps")
        tuples += opcode.name.startswith("TUPLE")
        if tuples > _MAX_TUPLES:
            raise UnsafePickleError("it holds more tuples than arrays need")
        if opcode.name == "LONG_BINPUT" and int(argument or 0) > count:
            raise UnsafePickleError(
                "its memo index is larger than any writer would use"
            )  # the unpickler would allocate memory up to that index


def _build_array(data: Any, dtype: Any, shape: tuple[Any, ...], fortran_order: bool) -> np.ndarray:
    array_dtype = _to_dtype(dtype)
    array_bytes = _to_bytes(data)
    if not all(isinstance(side, int) and 0 <= side < 2**40 for side in shape) or len(shape) > 8:
        raise UnsafePickleError("an array of an impossible shape")
    if math.prod(shape) * array_dtype.itemsize != len(array_bytes):
        raise UnsafePickleError(f"an array of {len(array_bytes):,} bytes, which is not {list(shape)} of {array_dtype}")
    return np.frombuffer(array_bytes, array_dtype).reshape(shape, order="F" if fortran_order else "C")


def _to_dtype(value: Any) -> np.dtype:
    match value:
        case _RecordedCall(kind="dtype", arguments=(bytes(code) | str(code), *_), state=state):
            text = code.decode("latin1") if isinstance(code, bytes) else code
            order = state[1] if isinstance(state, tuple) and len(state) > 1 else "|"
            big = order in (">", b">")
            if len(text) == 2 and text[0] in "iu" and text[1] in "1248":
                return np.dtype((">" if big else "<") + text)
            raise UnsafePickleError(f"an array of {text[:20]!r}, expected integers")
        case _:
            raise UnsafePickleError("an array of no type")


def _to_bytes(value: Any) -> bytes:
    match value:
        case bytes() | bytearray():
            return bytes(value)
        case _RecordedCall(kind="bytes", arguments=(str(text), "latin1" | "latin-1" | b"latin1" | b"latin-1")):
            return _encode_latin1(text)
        case _RecordedCall(kind="bytes", arguments=(bytes(data),)):
            return data
        case str():
            return _encode_latin1(value)
        case _:
            raise UnsafePickleError("an array without its bytes")


def _encode_latin1(text: str) -> bytes:
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        raise UnsafePickleError("an array whose data is not bytes") from None
