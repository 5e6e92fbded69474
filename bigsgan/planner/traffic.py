"""What a network's parameters and gradients have to travel in an update."""

from __future__ import annotations

from bigsgan.config import RunPlan


def turns(plan: RunPlan, network: str) -> int:
    """How often a network's parameters, or as many gradients, go through a ring in an update at its ZeRO stage.

    ZeRO 0 all-reduces an update's gradients, which is twice. ZeRO 1 scatters their sums and gathers updated parameters.
    ZeRO 2 keeps no whole gradient, so it scatters those of each micro-batch. ZeRO 3 gathers the parameters instead,
    forward and backward (Rajbhandari et al. 2020, arXiv 1910.02054, section 7). It gathers them once more for each
    micro-batch of the other network. For G these are forward passes for D's images, except images that G's update
    shares; for D they are at the seam, where the gradient at the images follows the forward pass, so that gathered
    parameters can stay. A D too large for that (stage3_max_reuse_distance) is gathered again, and exceeds this least
    number. A network that fits in that distance also stays from an update's forward to its backward pass, and needs
    less.
    """
    recipe, stage, updates = plan.recipe, plan.engines[network].file.stage, plan.recipe.updates_of(network)
    passes = {n: recipe.updates_of(n) * recipe.accumulation_of(n) for n in recipe.networks}
    if stage <= 1:
        return 2 * updates
    if stage == 2:
        return passes[network] + updates
    others = sum(passes.values()) - passes[network]
    if network == "generator" and recipe.objective.reuse_fakes and plan.keeps_generator_graphs:
        others -= recipe.accumulation_of("discriminator")
    return 3 * passes[network] + others
