"""`--data` at an address stays that address."""

import dataclasses

from paragan.cli.common import _absolute
from paragan.recipes import recipe


def test_an_address_is_not_made_a_path():
    run = recipe("folder")
    for path in ("http://127.0.0.1:1/shards", "s3://bucket/shards"):
        told = dataclasses.replace(run, data=dataclasses.replace(run.data, path=path))
        assert _absolute(told).data.path == path
