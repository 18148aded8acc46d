"""Sizes as people type and read them: one number for squares, width before height for others."""

import pytest

from paragan.config.sections import DataOptions
from paragan.core.errors import UsageError
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
    with pytest.raises(UsageError, match=r"^resolution=.*Use one number for squares.*WIDTHxHEIGHT, such as 256x128"):
        from_dict(DataOptions, {"resolution": value})


def test_a_size_on_the_command_line_is_recorded_as_it_is_typed():
    data = apply_overrides({}, [("resolution", "256x128")])
    options = from_dict(DataOptions, data)
    assert to_dict(options)["resolution"] == "256x128"
    assert from_dict(DataOptions, to_dict(options)) == options
    assert to_dict(from_dict(DataOptions, {"resolution": "64x64"}))["resolution"] == 64  # as it always was


def test_options_of_commands_are_checked_likewise():
    assert check_resolution("--resolution", "48x32") == (48, 32)
    with pytest.raises(UsageError, match=r"^--resolution=0: not a size"):
        check_resolution("--resolution", 0)
    with pytest.raises(UsageError, match=r"^--channels=0: not possible"):
        check_channels("--channels", 0)
    check_channels("--channels", 13)
