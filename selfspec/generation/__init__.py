"""One call of `generate`: the loop, prompts, stopping, streaming."""
