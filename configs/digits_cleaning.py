"""The bilevel job: half of the digits' training labels are drawn anew; weights tell which."""

import ml_collections

from experiments.bilevel import settings


def get_config() -> ml_collections.ConfigDict:
    return settings.base()
