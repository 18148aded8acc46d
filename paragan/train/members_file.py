"""members.json in a run folder: under an elastic strategy, where the ranks listen for others that join."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from paragan.comm.elastic.kv_store import ServerAddress
from paragan.core.atomic_write import atomic_write_bytes


def write_members(folder: Path, addresses: Mapping[int, ServerAddress], fingerprint: str) -> None:
    """Write members.json: where the ranks of an elastic run listen for those that join, and what they train on.

    Only its owner may read it, as it has the secrets with which one joins.
    """
    data = json.dumps({"members": addresses, "data": fingerprint}).encode()
    atomic_write_bytes(folder / "members.json", data, private=True)


def read_members(folder: Path) -> tuple[dict[int, ServerAddress], str]:
    """Return the addresses by rank and the fingerprint of the data; ({}, "") if they cannot be read."""
    try:
        saved = json.loads((folder / "members.json").read_text())
        members = saved["members"].items()
        addresses = {int(rank): ServerAddress(str(h), int(port), str(secret)) for rank, (h, port, secret) in members}
        return addresses, str(saved["data"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, ""
