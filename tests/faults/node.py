"""The agent of another node, on this machine; its ranks have points for faults.

python -m tests.faults.node HEAD PORT NODE FOLDER GONE_S      FOLDER: of a tests.faults.arming.Faults
"""

import os
import sys

from quire.config.vllm_environment import start_process
from quire.engine.startup import node_process
from tests.faults import ranks
from tests.faults.arming import Faults

SECRET = b"a secret of the tests"


def main(head, port, node, folder, gone_s):
    """gone_s: seconds without the head, after which the agent ends."""
    start_process(level="INFO")
    node_process.HEAD_GONE_S = float(gone_s)
    ranks.install_in_engine(Faults(folder), node_process)
    return node_process.run_node(head, int(port), int(node), SECRET)


if __name__ == "__main__":
    os.environ.pop("QUIRE_HOST_IP", None)
    sys.exit(main(*sys.argv[1:]))
