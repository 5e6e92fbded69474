"""`bigsgan plan --pipeline`: how networks would be divided into stages, and what that costs, without training."""

from __future__ import annotations

from bigsgan import comm, memory
from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.pipeline.layout import Division, describe_bubble, divide_network, measure_layers, samples_of
from bigsgan.errors import UserError


def main(plan: RunPlan) -> None:
    """Print the division of each network that has stages, and the bubble to expect of an update.

    Raises:
        UserError: No network has stages, or there are fewer layers than stages.
    """
    staged = [network for network in NETWORKS if plan.placement(network).num_stages > 1]
    if not staged:
        remedy = "set engines.generator.pipeline_stages=2, or the discriminator's, or both"
        raise UserError("--pipeline", None, "has nothing to show: no network has stages", remedy)
    divisions: dict[str, Division] = {}
    for network in staged:
        field = f"engines.{network}.partition"
        with memory.naming_remedy(f"while the layers of the {network} were measured", f"set {field}=parameters"):
            measured = measure_layers(plan, network, comm.device())
        divisions[network] = divide_network(plan, network, measured)
        print(divisions[network].table(samples_of(plan, network)))
    if text := describe_bubble(plan, divisions):
        print(text)
