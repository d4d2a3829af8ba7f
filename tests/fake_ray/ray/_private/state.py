import ray


def available_resources_per_node():
    return {one["id"]: {"GPU": one["free"]} for one in ray.CLUSTER["nodes"]}
