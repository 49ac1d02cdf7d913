"""Early exits inside serving engines, with the target's own weights and KV cache."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

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

    def configure_exit(self: SpeculativeConfig) -> None:
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

        _replace(DraftModelProposer, _proposer)
        if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
            from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import (
                StandaloneARSpeculator,
            )

            from selfspec.serving.vllm_runner_v2 import EarlyExitSpeculator, hand_out_streams

            _replace(StandaloneARSpeculator, lambda: EarlyExitSpeculator)
            hand_out_streams()


def tried(version: str) -> bool:
    """Whether this release of vLLM was tried."""
    return ".".join(version.split(".")[:2]) in TRIED


def _replace(proposer: Any, ours: Callable[[], type]) -> None:
    """Let vLLM make objects of our class instead of its own if the draft model is an exit."""

    def new(cls: type, vllm_config: VllmConfig, *_: object, **__: object) -> object:
        hf_config = vllm_config.speculative_config.draft_model_config.hf_config
        return object.__new__(ours() if hasattr(hf_config, "selfspec") else cls)

    proposer.__new__ = new


def _proposer() -> type:
    from selfspec.serving.vllm_plugin import EarlyExitProposer

    return EarlyExitProposer
