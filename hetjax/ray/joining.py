"""Where do the processes of a run meet that Ray has started, and how does each learn its number?"""

from hetjax.comm import join as join_lib


def own_address() -> str:
    """HOST:PORT of this process's node, as the others know it; no process listens at the port."""
    import ray

    host = ray.util.get_node_ip_address()
    port = join_lib.find_port(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def join(own: int, size: int, address: str) -> None:
    """Joins the others; a `hetjax.join_processes` of the function finds that it has.

    Args:
        own: the number of this process.
        size: of the run.
        address: HOST:PORT of process 0.
    """
    join_lib.join_processes(own, size, address)
