"""Make a row of a batch of a record: decode its files, cut a segment, and apply the user's transform.

A row depends on the record and on (seed, lane, position, row) only, so streaming, memory, and any number of workers and
ranks see the same, and a resume continues exactly.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from paragan.core.errors import UsageError
from paragan.core.image_shape import ImageSize
from paragan.core.philox import philox_generator
from paragan.core.user_imports import import_attribute
from paragan.data.decode import center_crop_resize, decode_image
from paragan.data.formats.read_span import max_record_bytes
from paragan.data.formats.record_source import RecordSelection
from paragan.data.records.audio import MAX_RATE, Audio, decode_audio, is_audio, prepare_audio
from paragan.data.records.layout import RecordLayout, choose_main_field, to_float
from paragan.data.source import DecodeError, FieldRecord, RowKey, Variation
from paragan.data.storage.filesystem import format_error, printable

Fields = dict[str, np.ndarray]
Transform = Callable[[Fields, np.random.Generator], Fields]

_TRANSFORM_PREFIX = "data.transform="
NPY_MAGIC = b"\x93NUMPY"
ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")  # the second if it holds nothing
MAX_SEGMENT = 2**24  # samples: 64 MiB of float32 for each row of a batch
_CORRUPTION_ERRORS = (
    *(zipfile.BadZipFile, EOFError, OSError, ValueError, TypeError, LookupError, RuntimeError, NotImplementedError),
    *(SyntaxError, MemoryError, OverflowError),
)


class TransformError(DecodeError):
    """The transform of the user failed: a run ends, where a damaged record would be replaced.

    Decode processes send the text of an error only, so `is_transform_error` recognises it by its start.
    """

    def __init__(self, name: str, problem: str):
        super().__init__(f"{_TRANSFORM_PREFIX}{name}: {problem}")


def is_transform_error(reason: str) -> bool:
    """Return whether the text of a `DecodeError` is that of a `TransformError`."""
    return reason.startswith(_TRANSFORM_PREFIX)


@dataclass(frozen=True)
class RecordOptions:
    """Options for reading records of several arrays (`DataOptions` describes the fields).

    aligned : (field, samples of the judged field for each of its frames)
    size    : width and height to which encoded images are cropped and resized; None to leave them
    """

    field: str = ""
    segment: int = 0
    aligned: tuple[tuple[str, int], ...] = ()
    sample_rate: int = 0
    resample: bool = False
    channels: int = 0
    transform: str = ""
    label_pattern: str = ""
    size: ImageSize | None = None

    @property
    def step(self) -> int:
        """Segments start at multiples of so many samples, where all aligned fields have a frame."""
        return math.lcm(1, *(hop for _, hop in self.aligned))

    @property
    def selection(self) -> RecordSelection:
        """The options that matter when a data set is opened."""
        return RecordSelection(self.field, self.label_pattern)

    def check_unused(self, location: str, first: str) -> None:
        """Raise UsageError if an option is set, for data that are no records of several arrays.

        Args:
            location: what messages call the data.
            first: what messages call their first image.
        """
        unset = {"segment": "0", "sample_rate": "0", "resample": "false", "aligned": "[]"}
        for name in ("field", "segment", "aligned", "sample_rate", "resample", "transform", "label_pattern"):
            if getattr(self, name):
                raise UsageError(
                    f"data.{name}: is for records of named arrays and for audio, and {location} holds others: {first}. "
                    f"Use --data.{name}={unset.get(name, repr(''))}, or --data with such records alone"
                )

    def with_rate(self, rate: int) -> RecordOptions:
        """Return the options with a sample rate, Hz."""
        return replace(self, sample_rate=rate)

    def check(self) -> None:
        """Raise UsageError if options contradict each other, or numbers are too large."""
        if self.aligned and not self.segment:
            raise UsageError("data.aligned: cuts fields with a segment, and there is none. Use --data.segment=N")
        if self.step > MAX_SEGMENT:
            raise UsageError(
                f"data.aligned: fields have a common frame at every {self.step:,} samples only. Use numbers of samples "
                f"of which {MAX_SEGMENT:,} or less is a multiple"
            )
        if self.segment > MAX_SEGMENT:
            longest = MAX_SEGMENT // self.step * self.step
            raise UsageError(
                f"data.segment={self.segment}: is more than {MAX_SEGMENT:,} samples. Use --data.segment={longest} or "
                "less"
            )
        if self.sample_rate > MAX_RATE:
            raise UsageError(
                f"data.sample_rate={self.sample_rate}: is more than {MAX_RATE:,} Hz. Use --data.sample_rate={MAX_RATE} "
                "or less"
            )
        if self.segment % self.step:
            longer = -(-self.segment // self.step) * self.step
            raise UsageError(
                f"data.segment={self.segment}: must be a multiple of {self.step}, so that aligned fields have whole "
                f"frames. Use {longer}"
            )
        if self.resample and not self.sample_rate:
            raise UsageError("data.resample=true: to which rate? Use --data.sample_rate=HZ")

    def fingerprint_parts(self) -> list[bytes]:
        """Return what changes the rows, as bytes."""
        return [f"{name}={value!r}".encode() for name, value in vars(self).items() if value]


@dataclass(frozen=True)
class RecordDecoder:
    """Decodes records into rows of a layout.

    layout : None while it is being found out
    """

    options: RecordOptions
    layout: RecordLayout | None = None

    def decode(self, record: FieldRecord, out: np.ndarray, variation: Variation = None) -> None:
        """Decode a record into `out` [row bytes] uint8.

        Raises:
            DecodeError: it is damaged, or its arrays do not fit.
            TransformError: the transform fails on it.
        """
        assert self.layout is not None
        self.layout.write(self.make_row(record, variation if isinstance(variation, tuple) else (0, 0, 0, 0)), out)

    def make_row(self, record: FieldRecord, key: RowKey) -> Fields:
        """Return the arrays of a record as a batch has them. Errors: see `decode`."""
        fields = self.cut(self.read_fields(record), key)
        return self._transform(fields, key) if self.options.transform else fields

    def read_fields(self, record: FieldRecord) -> Fields:
        """Return all arrays of a record as they are stored, audio at the rate of the data set.

        Raises:
            DecodeError: a file is damaged, or a value is not finite.
        """
        fields: Fields = {}
        files = record if isinstance(record, Mapping) else {"": record}
        for name, value in files.items():
            fields |= {name: _plain_dtype(value)} if isinstance(value, np.ndarray) else self._decode_file(name, value)
        for name, array in fields.items():
            if count := _num_not_finite(array):
                raise DecodeError(f"{count:,} of {array.size:,} values of {printable(name)} are NaN or infinite")
        return fields

    def cut(self, fields: Fields, key: RowKey) -> Fields:
        """Return fields with a random segment of the judged one, zero-padded if it is shorter, and of those aligned.

        Raises:
            DecodeError: a field is missing, or has another length than it should.
            UsageError: the judged field is among those aligned.
        """
        cut = self._cut_segment(fields, key) if self.options.segment else fields
        if self.layout and not self.options.transform:
            cut = self.layout.widen(cut)
        if self.layout and not self.options.transform and (mismatch := self.layout.find_mismatch(cut)):
            raise DecodeError(f"{mismatch}{self._mismatch_hint(cut)}")
        return cut

    def _cut_segment(self, fields: Fields, key: RowKey) -> Fields:
        length = self.options.segment
        name = segmented_field(fields, self.options.field)
        total = _last_axis(fields, name)
        step = self.options.step
        num_starts = max(total - length, 0) // step + 1
        start = step * int(philox_generator(key[0], "segment", *key[1:]).integers(num_starts))
        cut = {**fields, name: _slice_or_pad(fields[name], start, length)}
        for other, hop in self.options.aligned:
            if other == name:
                raise UsageError(
                    f"data.aligned={printable(name)}:{hop}: is the field that segments are cut from. Leave it out"
                )
            frames = _last_axis(fields, other)
            if not total // hop <= frames <= total // hop + 1:
                raise DecodeError(
                    f"{printable(other)} has {frames:,} frames, and {printable(name)} has {total:,} samples: "
                    f"{total // hop:,} of {hop} are due"
                )
            cut[other] = _slice_or_pad(fields[other], start // hop, length // hop)
        return cut

    def _transform(self, fields: Fields, key: RowKey) -> Fields:
        """Return what the user's transform makes of a record."""
        name = self.options.transform
        given = {field: _copy_as_float(array) for field, array in fields.items()}
        rng = philox_generator(key[0], "transform", *key[1:])
        try:
            returned: Any = load_transform(name)(given, rng)
        except (Exception, SystemExit) as error:  # user code may raise anything
            reason = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {format_error(error)}"
            raise TransformError(name, f"raised {reason}") from error
        if problem := _other_than_arrays(returned):
            raise TransformError(name, f"returned {problem}. Return a dict of NumPy arrays by name")
        fields = {field: _plain_dtype(array) for field, array in returned.items()}
        for field, array in fields.items():
            if _num_not_finite(array):
                raise TransformError(name, f"{printable(field)} that it returned holds NaN or infinity")
        if self.layout and (mismatch := self.layout.find_mismatch(fields)):
            raise TransformError(name, f"of what it returned, {mismatch}. Return equal shapes and types")
        return fields

    def _decode_file(self, name: str, data: bytes) -> Fields:
        try:
            return self._decode_content(name, data)
        except DecodeError as error:
            raise DecodeError(f"{printable(name)}: {error}" if name else str(error)) from None

    def _decode_content(self, name: str, data: bytes) -> Fields:
        """Return the arrays of a file: audio `wave`, an image `image`, an .npz whatever it holds; or `name` if set."""
        if data.startswith(ZIP_MAGIC):
            return _decode_npz(data)
        if data.startswith(NPY_MAGIC):
            return {name: _decode_npy(data)}
        if is_audio(data):
            audio = decode_audio(data)
            rate = self.options.sample_rate or audio.rate
            return {name or "wave": prepare_audio(audio, rate, self.options.channels, self.options.resample)}
        if not data:
            raise DecodeError("is empty")
        image = decode_image(data)
        channels = self.options.channels or (1 if image.mode == "L" else 3)
        size = self.options.size or ImageSize(*image.size)
        return {name or "image": center_crop_resize(image, size, channels)}

    def _mismatch_hint(self, fields: Fields) -> str:
        """Return what to do about records of different lengths or types."""
        assert self.layout is not None
        present = [field for field in self.layout.fields if field.name in fields]
        names = [field.name for field in present if fields[field.name].shape != field.shape]
        if not names:
            has_others = any(fields[field.name].dtype != field.dtype for field in present)
            return ": save all as one type, or convert them with --data.transform" if has_others else ""
        if not self.options.segment:
            return ": use --data.segment=N to cut segments"
        return f": use --data.aligned={printable(names[0])}:HOP to cut it with the segment"


@cache
def load_transform(name: str) -> Transform:
    """Import `module:function`.

    Raises:
        UsageError: it does not exist.
    """
    try:
        transform: Any = import_attribute(name)
    except (Exception, SystemExit) as error:  # importing a module may run any code
        raise UsageError(
            f"data.transform={name}: {format_error(error)}. Use module:function, and start in the folder of the module"
        ) from error
    if not callable(transform):
        raise UsageError(f"data.transform={name}: is not a function. Use module:function")
    return transform  # pyright: ignore[reportReturnType] - what it returns is checked at every call


def read_rate(record: FieldRecord) -> int:
    """Return the sample rate of the audio of a record, Hz; 0 without audio. Raises `DecodeError`."""
    values = record.values() if isinstance(record, Mapping) else (record,)
    for value in values:
        if isinstance(value, bytes) and is_audio(value):
            audio: Audio = decode_audio(value)
            return audio.rate
    return 0


def segmented_field(fields: Mapping[str, np.ndarray], field: str) -> str:
    """Return the field that segments are cut from: the judged one, if it is there before the transform."""
    return choose_main_field(fields, field if field in fields else "")


def _copy_as_float(array: np.ndarray) -> np.ndarray:
    """Return a copy, int16 as float32: a transform may write to it, and records in memory must stay as they are."""
    return to_float(array) if array.dtype == np.int16 else array.copy()


def _other_than_arrays(returned: Any) -> str:
    """Return what keeps a value from being a dict of arrays by name, in a few words; "" if it is one."""
    if not isinstance(returned, dict):
        return type(returned).__name__
    if not returned:
        return "an empty dict"
    for name, array in returned.items():
        if not isinstance(name, str):
            return f"the key {printable(repr(name))}"
        if not isinstance(array, np.ndarray):
            return f"{printable(name)} as {type(array).__name__}"
    return ""


def _last_axis(fields: Mapping[str, np.ndarray], name: str) -> int:
    """Return the length of the last axis of a field. Raises `DecodeError` if it does not exist."""
    if name not in fields:
        raise DecodeError(f"it has no field {printable(name)}")
    if not fields[name].ndim or not fields[name].shape[-1]:
        raise DecodeError(f"{printable(name)} is {list(fields[name].shape)}: it holds no samples")
    return fields[name].shape[-1]


def _slice_or_pad(array: np.ndarray, start: int, length: int) -> np.ndarray:
    """Return `length` samples of the last axis from `start` on, zeros after its end."""
    part = array[..., start : start + length]
    missing = length - part.shape[-1]
    if not missing:
        return part
    return np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, missing)])


def _num_not_finite(array: np.ndarray) -> int:
    """Return how many values are NaN or infinite."""
    return 0 if array.dtype.kind != "f" else array.size - int(np.isfinite(array).sum())


def _plain_dtype(array: np.ndarray) -> np.ndarray:
    """Return an array in the byte order of the machine, float64 as float32."""
    if array.dtype == np.float64:
        with np.errstate(over="ignore"):
            return array.astype(np.float32)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _decode_npy(data: bytes) -> np.ndarray:
    try:
        return _plain_dtype(np.lib.format.read_array(io.BytesIO(data), allow_pickle=False))
    except _CORRUPTION_ERRORS as error:
        raise DecodeError(f"is no array, or is damaged ({format_error(error)})") from None


def _decode_npz(data: bytes) -> Fields:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(info.file_size for info in archive.infolist())
            if size > max_record_bytes():
                raise DecodeError(f"takes {size:,} bytes decompressed, more than {max_record_bytes():,}")
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            if not names:
                raise DecodeError("is an npz without arrays")
            return {name.removesuffix(".npy"): _decode_npy(archive.read(name)) for name in names}
    except _CORRUPTION_ERRORS as error:
        raise DecodeError(f"is no npz, or is damaged ({format_error(error)})") from None
