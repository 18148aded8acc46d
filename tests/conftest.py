from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `import ranks, toy` from any test

import ranks
import toy

torch.set_num_threads(1)
cloudpickle.register_pickle_by_value(toy)


@pytest.fixture(scope="session")
def pool() -> Iterator[ranks.Pool]:
    pool = ranks.Pool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _by_value(request: pytest.FixtureRequest) -> None:
    """Jobs are sent to ranks by value: test modules are not importable there."""
    cloudpickle.register_pickle_by_value(request.module)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
