"""Sizes as people type and read them: one number for squares, width before height for others."""

import pytest

from advice import advises
from paragan.config.sections import DataOptions
from paragan.core.image_shape import ImageSize, check_channels, check_resolution, parse_resolution
from paragan.core.schema import apply_overrides, from_dict, to_dict


@pytest.mark.parametrize(
    ("value", "resolution"),
    [(64, 64), ("64", 64), ("64x64", 64), ("256x128", "256x128"), ("256 X 128", "256x128"), (0, 0)],
)
def test_a_resolution_has_one_form(value, resolution):
    assert parse_resolution(value) == resolution
    assert ImageSize.of(value).resolution == resolution


def test_the_width_comes_first_and_messages_say_so():
    size = ImageSize.of("256x128")
    assert (size.width, size.height) == (256, 128)
    assert str(size) == "256 wide, 128 high"
    assert str(ImageSize.of(64)) == "64 x 64"


@pytest.mark.parametrize("value", [-8, "256x", "x128", "0x128", "256x128x3", "wide", 64.5, True, [256, 128], None])
def test_what_is_no_size_is_refused_with_one_that_is(value):
    with advises("not a size. Use one number for squares, such as 64, or WIDTHxHEIGHT, such as 256x128") as caught:
        from_dict(DataOptions, {"resolution": value})
    assert str(caught.value).startswith("resolution=")
    for advised in ("64", "256x128"):
        assert ImageSize.of(from_dict(DataOptions, {"resolution": advised}).resolution).width == int(advised[:3])


def test_a_size_on_the_command_line_is_recorded_as_it_is_typed():
    data = apply_overrides({}, [("resolution", "256x128")])
    options = from_dict(DataOptions, data)
    assert to_dict(options)["resolution"] == "256x128"
    assert from_dict(DataOptions, to_dict(options)) == options
    assert to_dict(from_dict(DataOptions, {"resolution": "64x64"}))["resolution"] == 64  # as it always was


def test_options_of_commands_are_checked_likewise():
    assert check_resolution("--resolution", "48x32") == (48, 32)
    with advises("--resolution=0: not a size. Use 8 or more, such as 64, or 256x128 (WIDTHxHEIGHT)"):
        check_resolution("--resolution", 0)
    sizes = [check_resolution("--resolution", advised) for advised in (8, 64, "256x128")]
    assert sizes == [(8, 8), (64, 64), (256, 128)]
    for channels in (0, 513):
        with advises(
            f"--channels={channels}: not possible. Use 1 (grey), 3 (RGB), 4 (RGB and alpha), or the number that an "
            "array has, up to 512"
        ):
            check_channels("--channels", channels)
    for channels in (1, 3, 4, 13, 512):
        check_channels("--channels", channels)
