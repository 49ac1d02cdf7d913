"""lm-eval's command line; importing the package has registered the model."""

from __future__ import annotations

from importlib import import_module

if __name__ == "__main__":
    import_module("lm_eval.__main__").cli_evaluate()
