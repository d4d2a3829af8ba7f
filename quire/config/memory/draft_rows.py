"""Draft rows: how many rows a step with drafts has at most. A row with drafts is one for each of
its tokens, and each is sampled: so its logits are in the memory plan."""

MAX_DRAFT_ROWS = 512
"""With more rows than a few hundred each costs time in full, and drafts hardly pay."""

SPARE_DRAFT_ROWS = 256
"""Up to so many rows drafts may take memory for logits that the sequences alone would not."""


def draft_rows(max_seqs: int, max_drafts: int, max_tokens: int) -> int:
    """Return the rows of the largest step with drafts; 0: no step has any.

    max_drafts: of a row. max_tokens: of a step.
    """
    if not max_drafts:
        return 0
    most = max(min(max_seqs, MAX_DRAFT_ROWS), SPARE_DRAFT_ROWS)
    return min(max_seqs * (1 + max_drafts), most, max_tokens)
