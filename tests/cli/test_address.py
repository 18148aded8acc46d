"""`--data` at an address stays that address."""

import dataclasses

from paragan.cli.common import with_absolute_paths
from paragan.recipes import get_recipe


def test_an_address_is_not_turned_into_a_path():
    run = get_recipe("folder")
    for path in ("http://127.0.0.1:1/shards", "s3://bucket/shards"):
        replaced = dataclasses.replace(run, data=dataclasses.replace(run.data, path=path))
        assert with_absolute_paths(replaced).data.path == path
