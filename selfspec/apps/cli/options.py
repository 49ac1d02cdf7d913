"""Options of commands, declared once; a command takes them one by one or as a group.

A group is a dataclass whose fields are options; `common.command` makes options of its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from selfspec.config import DraftConfig, Options


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# As in `selfspec.config`, whose import would make `--help` slower.
Kernels = Literal["auto", "eager", "direct", "prepacked", "compiled", "graphs"]
KVCacheDtype = Literal["auto", "int8"]

_target = partial(typer.Option, rich_help_panel="Target")
_draft = partial(typer.Option, rich_help_panel="Draft")
_text = partial(typer.Option, rich_help_panel="Text")

Model = Annotated[
    str | None,
    _target(
        "--model",
        "-m",
        metavar="PATH_OR_ID",
        help="Folder or Hugging Face id of a causal language model.",
        show_default="the small model in the package",
    ),
]
Heads = Annotated[
    str | None,
    _target(
        metavar="PATH_OR_ID",
        help="Folder or Hugging Face id of exit heads fitted to the model.",
        show_default="those beside the model, if any",
    ),
]
DtypeOption = Annotated[
    Dtype,
    _target(
        "--dtype",
        help="Dtype of the weights; auto is the checkpoint's own, float32 for the model in the "
        "package.",
    ),
]
Device = Annotated[
    str | None,
    _target(
        metavar="DEVICE",
        help="Where to run: cpu, cuda, cuda:1, mps, or auto for all GPUs together.",
        show_default="cuda if there is one, else cpu",
    ),
]
KernelsOption = Annotated[
    Kernels,
    _target(
        "--kernels",
        help="How layers are computed. auto: prepacked where it pays and fits, else direct. "
        "eager: as transformers does. direct: the same, without decorators and without checking "
        "for hooks. prepacked: with linear maps packed once for a CPU in half precision (two or "
        "three times the weights' memory) and fewer small operations. compiled: through "
        "torch.compile. graphs: as CUDA graphs on a CUDA device.",
    ),
]
KVCacheOption = Annotated[
    KVCacheDtype,
    _target(
        "--kv-cache-dtype",
        help="Dtype of the KV cache: auto is that of the layers; int8 rounds keys and values.",
    ),
]
Profile = Annotated[
    Path | None,
    _draft(
        metavar="FILE",
        help="Profile made by selfspec tune.",
        show_default="the one beside the heads or the model, or in the user's cache",
    ),
]
MaxNewTokens = Annotated[int, _text("--max-new-tokens", "-n", min=1, help="Tokens to generate.")]
Seed = Annotated[int, _text(min=0, max=2**63 - 1, help="Seed of sampling.")]
System = Annotated[
    str | None, _text(metavar="TEXT", help="A system message, for the chat template.")
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help='Prompts: JSON lines or an array of objects with a "prompt" each, or one plain text; '
        "- reads stdin.",
        show_default=False,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON objects on stdout and nothing else.")
]


@dataclass(frozen=True)
class Drafting:
    """How a command drafts."""

    config: Annotated[
        Path | None, _draft(metavar="FILE", help="YAML file with a draft: section.")
    ] = None
    draft: Annotated[
        list[str] | None,
        _draft(
            "--draft",
            "-d",
            metavar="NAME|KEY=VALUE",
            help="A drafter, such as none, or a field of the draft, such as exit_layer=4; "
            "may be repeated.",
        ),
    ] = None

    @property
    def chosen(self) -> DraftConfig | None:
        """The draft; `None` if nothing was given."""
        return draft_config(self.config, self.draft)


@dataclass(frozen=True)
class Writing:
    """How long texts are, and how their tokens are chosen."""

    max_new_tokens: MaxNewTokens = 128
    temperature: Annotated[
        float | None,
        _text(
            min=0.0,
            help="Sampling temperature; 0 decodes greedily.",
            show_default="as the checkpoint's generation_config says, greedily if it says nothing",
        ),
    ] = None
    top_k: Annotated[int | None, _text(min=1, help="Sample from the K most likely tokens.")] = None
    top_p: Annotated[
        float | None,
        _text(
            min=0.0,
            max=1.0,
            help="Sample from the smallest set of tokens with at least this probability.",
        ),
    ] = None
    seed: Seed = 0

    @property
    def options(self) -> Options:
        """Options of transformers' `generate`; what was not given keeps the checkpoint's value."""
        limits = {"top_k": self.top_k, "top_p": self.top_p}
        options: dict[str, object] = {k: v for k, v in limits.items() if v is not None}
        if options and not self.temperature:
            raise typer.BadParameter(
                "--top-k and --top-p are for sampling; give a --temperature too"
            )
        if self.temperature is not None:
            options["do_sample"] = self.temperature > 0
        if self.temperature:
            options["temperature"] = self.temperature
        return {"max_new_tokens": self.max_new_tokens, **options}


def draft_config(file: Path | None, fields: Sequence[str] | None) -> DraftConfig | None:
    """The draft of a file's `draft` section, a drafter's name and `KEY=VALUE` fields.

    `None` without any of them.
    """
    if file is None and not fields:
        return None
    from selfspec.config import DraftConfig, StrictConfig, load_config
    from selfspec.drafters import CheckedDraft

    class Sections(StrictConfig):
        draft: CheckedDraft = DraftConfig()

    overrides = [
        f"draft.{field}" if "=" in field else f"draft.drafter={field}" for field in fields or ()
    ]
    return load_config(Sections, file, overrides).draft
