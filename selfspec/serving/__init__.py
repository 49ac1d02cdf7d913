"""Early exits inside serving engines, with the target's own weights and KV cache."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

SCHEME = "selfspec:"
"""What the draft model of a speculative config starts with: `selfspec:[HEADS][@[KIND:]EXIT]`."""
TRIED = ("0.32",)
"""Minor releases of vLLM that `make test-engines` was run with."""


def register() -> None:
    """Make vLLM understand `"model": "selfspec:..."`; calling it again changes nothing.

    An entry point of the group `vllm.general_plugins`: every process of vLLM calls it. The
    internals of vLLM that drafting needs are imported only in a release that was tried; in another
    one such a model is refused.
    """
    import vllm
    from vllm.config import SpeculativeConfig

    if getattr(SpeculativeConfig.__post_init__, "selfspec", False):
        return
    configure = SpeculativeConfig.__post_init__

    def configure_exit(self: Any) -> None:
        if not (isinstance(self.model, str) and self.model.startswith(SCHEME)):
            return configure(self)
        if not tried(vllm.__version__):
            raise ValueError(
                f"selfspec drafts inside vLLM {', '.join(TRIED)}, this is {vllm.__version__}; "
                "install one of these, or serve an exported head (`selfspec export`)"
            )
        from selfspec.serving import vllm_plugin

        vllm_plugin.configure_exit(self, configure)

    configure_exit.selfspec = True  # pyright: ignore[reportFunctionMemberAccess]
    SpeculativeConfig.__post_init__ = configure_exit
    if tried(vllm.__version__):
        from vllm.v1.spec_decode.draft_model import DraftModelProposer

        DraftModelProposer.__new__ = _make_proposer


def tried(version: str) -> bool:
    """Whether this release of vLLM was tried."""
    return ".".join(version.split(".")[:2]) in TRIED


def _make_proposer(cls: type, vllm_config: Any, *_: Any, **__: Any) -> Any:
    """`__new__` of vLLM's proposer for draft models."""
    if not hasattr(vllm_config.speculative_config.draft_model_config.hf_config, "selfspec"):
        return object.__new__(cls)
    from selfspec.serving.vllm_plugin import EarlyExitProposer

    return object.__new__(EarlyExitProposer)
