"""After a node is lost, the others get the address of its store."""

import sys
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
nodes = [
    get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=f"127.0.0.1:{store.port}",
            run_id="test",
            min_nodes=2,
            max_nodes=3,
            local_addr=f"127.0.0.{number}",
            is_host=False,
            keep_alive_interval=1,
            keep_alive_max_attempt=2,
            last_call_timeout=1,
        )
    )
    for number in (1, 2, 3)
]


def addresses(nodes):
    """Of the store of workers, for each node, in the next round."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        infos = list(pool.map(lambda node: node.next_rendezvous(), nodes))
    return [info.bootstrap_store_info.master_addr for info in infos]


try:
    first = addresses(nodes)
    others = [node for node in nodes if node._this_node.addr != first[0]]
    (lost,) = (node for node in nodes if node not in others)
    lost._stop_heartbeats()
    second = addresses(others)
finally:
    for node in nodes:
        node.shutdown()
if len(set(second)) > 1 or first[0] in second:
    sys.exit(f"fault: {first[0]} is lost, but the others get {second}")
