"""Which experts each token went to, and how near another choice was.

Two implementations round differently, so where two experts score alike to the last digits they may
choose differently, and one token's log-probabilities are then far apart with nothing wrong. Here the
two are distinguished: transformers' model is made to choose as ours did, and for every token it is
measured by how much its own scores would have to move for that choice.
"""

from contextlib import contextmanager

import torch

from quire.layers import Router

GATES = ("mlp.gate", "mixer.gate", "feed_forward.gate", ".router")


@contextmanager
def recorded(model):
    """A list that holds, after the block: (router, ids [T, k], weights) of each of our routers."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    pieces = [[] for _ in routers]
    hooks = [
        router.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out))
        for router, seen in zip(routers, pieces)
    ]
    chosen = []
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()
    for router, seen in zip(routers, pieces):
        ids, weights = (torch.cat(parts) for parts in zip(*seen))
        chosen.append((router, ids.long(), weights))


def alike(some, others):
    """Whether both hold the same choices."""
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a.sort().values, b.sort().values) for (_, a, _), (_, b, _) in pairs)


@contextmanager
def forced(theirs, chosen):
    """transformers' model chooses as in `chosen`; a list that fills with one margin per layer."""
    gates = [m for name, m in theirs.named_modules() if name.endswith(GATES)]
    assert len(gates) == len(chosen)
    margins = []

    def choose(router, ids, weights):
        def hook(gate, args, out, weights=weights):
            spread = len(out) == 2  # Llama 4: weights of all experts, 0 for those not chosen
            if spread:
                their_weights, their_ids = out[0].topk(ids.shape[1], dim=-1)
                logits = out[1]
            else:
                logits, their_weights, their_ids = out
            if (factors := getattr(gate, "per_expert_scale", None)) is not None:  # Gemma-4
                logits, weights = logits.log(), weights * factors[ids]
            scores = ranked(router, logits)
            assert margin(scores, their_ids, router.routing).max() <= 1e-6, "another rule of choice"
            margins.append(margin(scores, ids, router.routing).max().item())
            same = (ids.sort().values == their_ids.sort().values).all(-1, keepdim=True)
            weights_, ids_ = weights.to(their_weights.dtype), ids.to(their_ids.dtype)
            made, chosen = (
                torch.where(same, their_weights, weights_),
                torch.where(same, their_ids, ids_),
            )
            if spread:
                return torch.zeros_like(logits).scatter(1, chosen, made), logits
            return logits, made, chosen

        return hook

    hooks = [gate.register_forward_hook(choose(*one)) for gate, one in zip(gates, chosen)]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()


def ranked(router, logits):
    """The scores that experts are chosen by."""
    logits = logits.float()
    scores = logits.softmax(-1) if router.routing.score == "softmax" else logits.sigmoid()
    correction = router.e_score_correction_bias
    return scores if correction is None else scores + correction.float()


def margin(scores, ids, routing):
    """By how much scores [T, X] must move at most for ids [T, k] to be the best: [T]; 0 if they are.

    Within the groups that are chosen from, the worst of the chosen must reach the best of the
    others; of two that tie, each moves half way. So must the groups themselves.
    """
    tokens, experts = scores.shape
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, True)
    grouped = scores.view(tokens, routing.groups, -1)
    parts = 1 if routing.group_score == "max" else 2
    worth = grouped.topk(parts, dim=-1).values.sum(-1)
    needed = taken.view_as(grouped).any(-1)
    filled = torch.where(needed, torch.inf, worth).topk(routing.top_groups).indices
    open_ = torch.zeros_like(needed).scatter(1, filled, True)
    assert (needed <= open_).all(), "experts of too many groups"
    between = _short(worth, needed, ~open_) / (2 * parts)
    reachable = open_[:, :, None].expand_as(grouped).reshape(tokens, experts)
    return torch.maximum(between, _short(scores, taken, reachable & ~taken) / 2)


def _short(values, inside, outside):
    """How far the least of those inside is below the largest outside: [T], at least 0."""
    least = values.masked_fill(~inside, torch.inf).amin(-1)
    return (values.masked_fill(~outside, -torch.inf).amax(-1) - least).clamp(min=0.0)
