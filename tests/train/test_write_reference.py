"""Statistics of real images are written in the spaces that a message names."""

from __future__ import annotations

import numpy as np
import pytest

from advice import advises
from paragan.data.dataset import from_arrays
from paragan.train.write_reference import compute_reference


@pytest.mark.slow
def test_statistics_of_a_classifier_are_refused():
    dataset = from_arrays(np.random.default_rng(0).integers(0, 256, (8, 4, 4, 1), np.uint8))
    with advises("Use pixels or inception"):
        compute_reference(dataset, "resnet20")
    assert compute_reference(dataset, "pixels").count == 8
