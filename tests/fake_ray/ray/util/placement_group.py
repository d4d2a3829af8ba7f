import ray


class PlacementGroup:
    def __init__(self, key):
        self.id = key
        self.nodes = ray.CLUSTER["groups"].get(key.data.hex(), {}).get("nodes")


class _New:
    """Bundles go to the nodes of their selectors, else to the first with free GPUs."""

    def __init__(self, bundles, selectors):
        free = {one["id"]: one["free"] for one in ray.CLUSTER["nodes"] if one.get("alive", True)}
        self.nodes = []
        for selector in selectors:
            wanted = selector.get("ray.io/node-id")
            fit = [n for n, left in free.items() if left >= 1 and wanted in (None, n)]
            if fit:
                free[fit[0]] -= 1
                self.nodes.append(fit[0])
        self.placed = len(self.nodes) == len(bundles)

    def wait(self, timeout_seconds):
        ray.log("wait", timeout_seconds)
        return self.placed


def placement_group(bundles, strategy, bundle_label_selector):
    ray.log("group", bundles, strategy)
    return _New(bundles, bundle_label_selector)


def remove_placement_group(group):
    ray.log("remove")


def placement_group_table(group):
    found = ray.CLUSTER["groups"].get(group.id.data.hex())
    if found is None:
        return {}
    return {"state": found.get("state", "CREATED"), "bundles": dict(enumerate(found["bundles"]))}
