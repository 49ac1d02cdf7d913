"""`python -m selfspec.bench.lm_eval_harness`: lm-eval's command line, with `selfspec` in it.

lm-eval finds the model by itself from the release on that reads entry points; before that, this
makes it known.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run lm-eval."""
    try:
        from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    except ImportError:
        sys.exit("selfspec: lm-eval is not installed (pip install 'selfspec[eval]')")
    from selfspec.bench.lm_eval_harness import lm_eval  # noqa: F401 - registers the model

    cli_evaluate()


if __name__ == "__main__":
    main()
