"""Where do the processes of a run meet that Ray has started, and which nodes go?"""

from typing import Any

from hetjax.comm import join

_DRAINING_SECS = 1.0  # for an answer


def own_address() -> str:
    """HOST:PORT of this process's node, as the others know it; no process listens at the port."""
    import ray

    host = ray.util.get_node_ip_address()
    port = join.find_port(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def connect() -> None:
    """Connects this process to Ray, as Ray would at the first call, if it is not.

    Raises:
        ValueError: Ray refuses this process's token.
        ConnectionError: there is no Ray at the address of `RAY_ADDRESS`.
    """
    import ray
    from ray import _raylet

    if ray.is_initialized():
        return
    try:
        ray.init()
    except ConnectionError as error:  # it has asked for 20 s, and says no reason
        address = str(error).split()[-1]
        try:
            _raylet.GcsClient(address=address)  # type: ignore[attr-defined]
        except ray.exceptions.AuthenticationError as refused:
            raise ValueError(f"launch: Ray at {address} refuses the token: {refused}") from error
        except ray.exceptions.RpcError:
            pass
        raise


def head() -> Any:
    """A client of Ray's head, which is asked for at once: without the head it takes a minute."""
    import ray
    from ray import _raylet

    return _raylet.GcsClient(address=ray.get_runtime_context().gcs_address)  # type: ignore


def draining(head: Any) -> set[str]:
    """The nodes that are drained, such as by SIGTERM to `ray start --block`; none without the
    head."""
    import ray

    try:
        return set(head.get_draining_nodes(timeout=_DRAINING_SECS))
    except ray.exceptions.RayError:
        return set()
