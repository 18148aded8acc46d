"""Files behind an address: https://, s3://, whatever fsspec reaches."""

from paragan.data.places import Place, Reach
from paragan.errors import Unusable


def far_place(where: str, reach: Reach) -> tuple[Place, str]:
    """The folder that an address names, or lies in, and the name of a file in it ("" for the folder itself)."""
    raise Unusable(f"data: {where}: addresses are not reached yet; give a path, within {reach.patience_s} s")
