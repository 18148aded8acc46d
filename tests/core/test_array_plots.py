"""Pictures that networks of the user's own draw."""

from typing import Any

import numpy as np
import pytest

from advice import advises
from paragan.core.array_plots import check_picture


@pytest.mark.parametrize("wrong", ["a picture", np.zeros((4, 6, 3)), np.zeros((4, 6), np.uint8)])
def test_a_picture_is_an_array_as_advised(wrong: Any):
    with advises("Return a uint8 array [H, W, 3]"):
        check_picture(wrong, "Nets")
    assert check_picture(np.zeros((4, 6, 3), np.uint8), "Nets").shape == (4, 6, 3)


@pytest.mark.parametrize("shape", [(4, 6, 2), (0, 6, 3)])
def test_a_picture_has_a_shape_as_advised(shape: tuple[int, ...]):
    with advises(f"Nets.picture(samples, reals): returned {list(shape)}. Return [H, W, 3]"):
        check_picture(np.zeros(shape, np.uint8), "Nets")
    assert check_picture(np.zeros((4, 6, 3), np.uint8), "Nets").shape == (4, 6, 3)
