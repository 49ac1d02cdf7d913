"""Early exits inside serving engines, with the target's own weights and KV cache."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from typing import TYPE_CHECKING

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

        DraftModelProposer.__new__ = _make_proposer
        if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
            _register_runner_v2()


def tried(version: str) -> bool:
    """Whether this release of vLLM was tried."""
    return ".".join(version.split(".")[:2]) in TRIED


def _register_runner_v2() -> None:
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    from selfspec.serving.vllm_runner_v2 import EarlyExitSpeculator, hand_out_streams

    def make(cls: type, vllm_config: VllmConfig, *_: object) -> object:
        exits = _names_an_exit(vllm_config)
        return object.__new__(EarlyExitSpeculator if exits else cls)

    StandaloneARSpeculator.__new__ = make
    hand_out_streams()


def _make_proposer(cls: type, vllm_config: VllmConfig, *_: object, **__: object) -> object:
    """`__new__` of vLLM's proposer for draft models."""
    if not _names_an_exit(vllm_config):
        return object.__new__(cls)
    from selfspec.serving.vllm_plugin import EarlyExitProposer

    return object.__new__(EarlyExitProposer)


def _names_an_exit(vllm_config: VllmConfig) -> bool:
    return hasattr(vllm_config.speculative_config.draft_model_config.hf_config, "selfspec")
