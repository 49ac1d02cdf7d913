"""Which way to draft is fastest, here and on these texts: what `selfspec tune` measures."""

from selfspec.bench.tune.config import TuneConfig
from selfspec.bench.tune.run import Progress, tune

__all__ = ["Progress", "TuneConfig", "tune"]
