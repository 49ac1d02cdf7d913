"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from selfspec.config import DraftConfig


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# As in `selfspec.config`, whose import would make `--help` slower.
Kernels = Literal["auto", "eager", "prepacked", "compiled", "graphs"]
KVCacheDtype = Literal["auto", "int8"]

_TARGET = "Target"
_DRAFT = "Draft"
_TEXT = "Text"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="PATH_OR_ID",
        help="Folder or Hugging Face id of a causal language model.",
        show_default="the small model in the package",
        rich_help_panel=_TARGET,
    ),
]
Heads = Annotated[
    str | None,
    typer.Option(
        metavar="PATH_OR_ID",
        help="Folder or Hugging Face id of exit heads fitted to the model.",
        show_default="those beside the model, if any",
        rich_help_panel=_TARGET,
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        help="Dtype of the weights; auto is the checkpoint's own, float32 for the model in the "
        "package.",
        rich_help_panel=_TARGET,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="Where to run.",
        show_default="cuda if there is one, else cpu",
        rich_help_panel=_TARGET,
    ),
]
KernelsOption = Annotated[
    Kernels,
    typer.Option(
        "--kernels",
        help="How layers are computed. auto: prepacked where it pays and fits, else eager. "
        "eager: as transformers does. prepacked: with linear maps packed once for a CPU in half "
        "precision (two or three times the weights' memory) and fewer small operations. compiled: "
        "through torch.compile. graphs: as CUDA graphs on a CUDA device.",
        rich_help_panel=_TARGET,
    ),
]
KVCacheOption = Annotated[
    KVCacheDtype,
    typer.Option(
        "--kv-cache-dtype",
        help="Dtype of the KV cache: auto is that of the layers; int8 rounds keys and values.",
        rich_help_panel=_TARGET,
    ),
]

Profile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Profile made by selfspec tune.",
        show_default="the one beside the heads or the model, or in the user's cache",
        rich_help_panel=_DRAFT,
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", "-n", min=1, help="Tokens to generate.", rich_help_panel=_TEXT
    ),
]
Temperature = Annotated[
    float,
    typer.Option(min=0.0, help="Sampling temperature; 0 decodes greedily.", rich_help_panel=_TEXT),
]
OwnTemperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Sampling temperature; 0 decodes greedily.",
        show_default="as the checkpoint's generation_config says, greedily if it says nothing",
        rich_help_panel=_TEXT,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="A system message, for the chat template.", rich_help_panel=_TEXT
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of sampling.", rich_help_panel=_TEXT)]

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")
]

Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML file with a draft: section.", rich_help_panel=_DRAFT),
]
Draft = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        "-d",
        metavar="NAME|KEY=VALUE",
        help="A drafter, such as none, or a field of the draft, such as exit_layer=4; "
        "may be repeated.",
        rich_help_panel=_DRAFT,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(min=1, help="Sample from the K most likely tokens.", rich_help_panel=_TEXT),
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Sample from the smallest set of tokens with at least this probability.",
        rich_help_panel=_TEXT,
    ),
]


def draft_config(file: Path | None, fields: Sequence[str] | None) -> DraftConfig | None:
    """The draft of a file's `draft` section, a drafter's name and `KEY=VALUE` fields.

    `None` without any of them.
    """
    if file is None and not fields:
        return None
    from selfspec.config import DraftConfig, StrictConfig, load_config

    class Sections(StrictConfig):
        draft: DraftConfig = DraftConfig()

    overrides = [
        f"draft.{field}" if "=" in field else f"draft.drafter={field}" for field in fields or ()
    ]
    return load_config(Sections, file, overrides).draft


def sampling(temperature: float | None, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """Options of transformers' `generate`; what is `None` keeps the checkpoint's value."""
    given = {"top_k": top_k, "top_p": top_p}
    chosen = {name: value for name, value in given.items() if value is not None}
    if temperature:
        return {"do_sample": True, "temperature": temperature, **chosen}
    if chosen:
        raise typer.BadParameter("--top-k and --top-p are for sampling; give a --temperature too")
    return {} if temperature is None else {"do_sample": False}
