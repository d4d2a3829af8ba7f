class PlacementGroupSchedulingStrategy:
    def __init__(self, group, placement_group_bundle_index):
        self.group, self.bundle = group, placement_group_bundle_index


class NodeAffinitySchedulingStrategy:
    def __init__(self, node, soft):
        assert not soft
        self.node = node
