"""The model `selfspec` of lm-eval: its `hf` model, with `generate` replaced.

Releases of lm-eval after 0.4.13 find it by its entry point; for the others,
`python -m selfspec.apps.bench.lm_eval` is lm-eval's command line with the model registered.

Tasks that generate are sped up. Tasks that compare log-likelihoods (multiple choice, perplexity)
run through the model's own forward, as with `hf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from selfspec.config import DraftConfig, JsonObject, Options
from selfspec.drafters import check_draft, make_drafter
from selfspec.heads import HEADS_CONFIG
from selfspec.model import SelfSpecModel
from selfspec.schedule.stats import Stats

try:
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise ImportError(f"{error}; lm-eval's models need: pip install 'selfspec[eval]'") from None


@register_model("selfspec")
class SelfSpecLM(HFLM):
    """lm-eval's `hf` model, drafting for itself where it generates; it takes all arguments of `hf`.

    Args:
        pretrained: folder or id of the target, or a loaded model.
        draft: how to draft: a drafter's name, or a dict of `DraftConfig` fields; `None` takes the
            profile's draft, or the default.
        heads: folder or id of exit heads; `None` takes those beside the target, if there are any.
        draft_model: a smaller model for the drafter `two_model`, its folder or id.
        profile: what `selfspec tune` found.
        **kwargs: of `hf`.
    """

    def __init__(
        self,
        pretrained: object,
        draft: DraftConfig | Options | str | None = None,
        heads: str | None = None,
        draft_model: str | None = None,
        profile: str | None = None,
        **kwargs: Any,
    ):
        asked = None if draft is None else check_draft(DraftConfig.of(draft))
        super().__init__(pretrained, **kwargs)
        if heads is None and isinstance(pretrained, str):
            heads = pretrained if (Path(pretrained) / HEADS_CONFIG).is_file() else None
        self.spec = SelfSpecModel(self.model, heads, draft_model, profile)
        self.draft = asked or self.spec.default_draft
        make_drafter(self.spec.engine, self.draft)  # refuses what this model cannot make
        self.stats = Stats()

    def _model_generate(
        self, context: Tensor, max_length: int, stop: Sequence[str], **generation_kwargs: Any
    ) -> Tensor:
        options = {"do_sample": False, **generation_kwargs}
        if not options["do_sample"]:
            options.pop("temperature", None)  # which is 0 then, and transformers warns of it
        ends = _StopSequences(self.tokenizer, stop, context.shape[1])
        with torch.autocast(
            device_type=self.device.type,
            dtype=self.mixed_precision_dtype,
            enabled=self.mixed_precision_dtype is not None,
        ):
            written = self.spec.generate(
                context,
                draft=self.draft,
                max_length=max_length,
                stopping_criteria=StoppingCriteriaList([ends]),
                pad_token_id=self.tokenizer.pad_token_id,
                **options,
            )
        assert isinstance(written, Tensor) and self.spec.last_stats is not None
        self.stats += self.spec.last_stats
        return written

    def get_model_info(self) -> JsonObject:
        """Facts that lm-eval stores beside the scores, with the acceptance rate."""
        speculation = {
            "draft": self.draft.model_dump(mode="json", exclude_defaults=True),
            "drafted": self.stats.drafted,
            "accepted": self.stats.accepted,
            "acceptance_rate": self.stats.acceptance_rate,
        }
        return {**super().get_model_info(), "selfspec": speculation}


class _StopSequences(StoppingCriteria):
    """Stops a row when its output, after `start` tokens of prompt and padding, has a stop sequence.

    The criterion of `hf` remembers which rows have stopped. Here rows advance at different speeds,
    so each call looks at the row alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], start: int):
        self.tokenizer, self.texts, self.start = tokenizer, texts, start
        widths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        # The sequence may be tokenized differently in context, and begin inside a token.
        self.reach = max(widths, default=0) + 2

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Any:
        last = self.tokenizer.batch_decode(input_ids[:, self.start :][:, -self.reach :])
        ended = [any(text in written for text in self.texts) for written in last]
        return torch.tensor(ended, device=input_ids.device)
