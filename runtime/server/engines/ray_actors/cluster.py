"""The connection to a Ray cluster, and the actors of a placement group."""

import logging
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from atomc.options import atomc_variables, ray_address
from atomc.runtime.server.engines.ray_actors.placement import Resources, check_address


def connect() -> None:
    """Connect this process to the cluster of RAY_ADDRESS, or of this host. Raises ValueError if
    there is none.
    """
    check_address(ray_address())
    try:
        ray.init(address="auto", logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ValueError(
            "--ray: no Ray cluster is found: start one with `ray start --head` on one host and "
            "`ray start --address HOST:6379` on the others, and run this command on one of them"
        ) from error


def own_address() -> str:
    """The address of this host in the cluster."""
    return str(ray.util.get_node_ip_address())


def create_actor(kind: type, group: PlacementGroup, index: int, bundle: Resources) -> Any:
    """An actor that uses all of this bundle of the group, with this process's options in the
    environment. It ends with this process.
    """
    remote = ray.remote(
        num_cpus=bundle["CPU"],
        num_gpus=bundle.get("GPU", 0),
        max_restarts=0,
        runtime_env={"env_vars": atomc_variables()},
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        ),
    )
    return remote(kind).remote()
