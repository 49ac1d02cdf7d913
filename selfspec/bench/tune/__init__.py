"""What `selfspec tune` measures: which draft is fastest on this device and these prompts."""

from selfspec.bench.tune.config import TuneConfig
from selfspec.bench.tune.run import Progress, tune

__all__ = ["Progress", "TuneConfig", "tune"]
