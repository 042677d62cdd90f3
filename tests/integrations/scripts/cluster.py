"""A Ray cluster of two nodes on this machine, as an administrator would have started it; ends with its input."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    node = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    cluster.wait_for_nodes()
    print(f"at {cluster.address}", flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
