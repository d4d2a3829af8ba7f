"""Counted collectives: names of those that a rank counts. Without torch."""

COUNTED_COLLECTIVES = (
    "none",
    "all_reduce",
    "all_gather",
    "broadcast",
    "send",
    "receive",
    "all_to_all",
    "gather_rows",
    "sum_rows",
    "sent",
    "received",
)
"""Names of the collectives that are counted."""
