"""A fake of Ray: the calls that quire makes, over the cluster that $FAKE_RAY describes as JSON.

nodes: id, address, total, free of each; me: id of this node; groups: id -> bundles, state, nodes;
error: of init; ends: how agents of nodes end; log: a file that gets a line for each call.
"""

import json
import os
import types

from ray import exceptions as exceptions
from ray import util as util

CLUSTER = json.loads(os.environ["FAKE_RAY"])


def log(*words):
    with open(CLUSTER["log"], "a", encoding="utf-8") as file:
        print(*words, file=file)


def init(address, logging_level):
    log("init", address, os.environ["RAY_USAGE_STATS_ENABLED"])
    assert logging_level == 30
    if "error" in CLUSTER:
        raise ConnectionError(CLUSTER["error"])


def shutdown():
    log("shutdown")


def nodes():
    return [
        {
            "NodeID": one["id"],
            "Alive": one.get("alive", True),
            "NodeManagerAddress": one["address"],
            "NodeManagerHostname": f"host-{one['id']}",
            "Resources": {"GPU": one["total"], "CPU": 4.0},
        }
        for one in CLUSTER["nodes"]
    ]


def get_runtime_context():
    return types.SimpleNamespace(get_node_id=lambda: CLUSTER["me"])


class PlacementGroupID:
    def __init__(self, data):
        self.data = data


class Answer:
    def __init__(self, value, ends=True):
        self.value, self.ends = value, ends


def get(answers, timeout=None):
    if isinstance(answers, Answer):
        if isinstance(answers.value, Exception):
            raise answers.value
        return answers.value
    return [get(one) for one in answers]


def wait(answers, num_returns, timeout):
    ready = [one for one in answers if one.ends][:num_returns]
    return ready, [one for one in answers if one not in ready]


def kill(actor):
    log("kill", actor.bundle)


class Method:
    def __init__(self, call):
        self.remote = call


class Actor:
    def __init__(self, options):
        strategy = options["scheduling_strategy"]
        self.bundle = strategy.bundle
        self.node_id = strategy.group.nodes[self.bundle]
        log("actor", self.bundle, options["num_gpus"], options["num_cpus"])
        self.describe = Method(self._describe)
        self.prepare = Method(self._prepare)
        self.run = Method(self._run)

    def _describe(self, bundle):
        (node,) = [one for one in CLUSTER["nodes"] if one["id"] == self.node_id]
        devices = [str(self.bundle)] if node["total"] else []
        return Answer(
            {
                "bundle": bundle,
                "node_id": self.node_id,
                "address": node["address"],
                "host": f"host-{self.node_id}",
                "devices": devices,
            }
        )

    def _prepare(self, variables, devices):
        log("prepare", self.bundle, sorted(variables), devices)
        return Answer([])

    def _run(self, head, port, node, secret):
        log("run", self.bundle, head, port, node, len(secret))
        end = CLUSTER.get("ends")
        value = exceptions.RayActorError("it is gone\nmore") if end == "died" else 0
        return Answer(value, ends=end is not None)


class OnNode:
    """An actor of a class of quire, run at once in this process; those of node "broken" fail."""

    def __init__(self, kind, node):
        self._made, self._node = kind(), node

    def __getattr__(self, name):
        def call(*words):
            if self._node == "broken":
                return Answer(exceptions.RayActorError("it is\nModuleNotFoundError: quire"))
            return Answer(getattr(self._made, name)(*words))

        return Method(call)


def remote(kind):
    def options(scheduling_strategy, **given):
        given["scheduling_strategy"] = scheduling_strategy
        node = getattr(scheduling_strategy, "node", None)
        made = (lambda: OnNode(kind, node)) if node else (lambda: Actor(given))
        return types.SimpleNamespace(remote=made)

    return types.SimpleNamespace(options=options)
