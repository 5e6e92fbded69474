"""Whether the penalties of an objective fit each other."""

from __future__ import annotations

from bigsgan.config.families.base import NetworkSection
from bigsgan.config.objective import Objective
from bigsgan.errors import UserError


def check_penalties(objective: Objective, discriminator: NetworkSection) -> None:
    """Refuse penalties whose keys do not fit each other.

    Raises:
        UserError: Some do not.
    """
    asked = {name: method for name, method in objective.methods("discriminator").items() if method != "auto"}
    if len(set(asked.values())) > 1:
        (first, method), *_, (last, other) = asked.items()
        problem, detail = f"must be that of objective.{first} ({method})", "D's penalties share their passes"
        raise UserError(f"objective.{last}.method", other, problem, "give all the same method, or none", detail)
    _check_part(objective, discriminator)
    for name, penalty in objective.gradient_norms.items():
        if penalty.form != "exact" and penalty.method != "auto":
            field, problem = f"objective.{name}.method", f"must be auto with form={penalty.form}"
            raise UserError(field, penalty.method, problem, f"remove it, or set objective.{name}.form=exact")
    for name, section in objective.scheduled.items():
        if section.decay_nimg is not None and section.final_weight is None:
            field, remedy = f"objective.{name}.decay_nimg", f"give objective.{name}.final_weight, or remove it"
            raise UserError(field, section.decay_nimg, "must be unset without final_weight", remedy)
    if objective.adversarial.adaptive and objective.adversarial.normalize:
        problem, remedy = "must be null with objective.adversarial.adaptive", "remove either: both weigh one gradient"
        field = "objective.adversarial.normalize"
        raise UserError(field, f"decay={objective.adversarial.normalize.decay:g}", problem, remedy)


def _check_part(objective: Objective, discriminator: NetworkSection) -> None:
    """Refuse penalties on several parts of the batch, and on one where D needs all images."""
    shrink, first = objective.batch_shrink, next(iter(objective.penalties), "")
    for name, penalty in objective.penalties.items():
        if penalty.batch_shrink != shrink:
            problem, detail = f"must be that of objective.{first} ({shrink})", "D's penalties share their passes"
            remedy = "give all the same batch_shrink, or none"
            raise UserError(f"objective.{name}.batch_shrink", penalty.batch_shrink, problem, remedy, detail)
    own = next((f"terms.{n}.differentiates" for n, term in enumerate(objective.terms) if term.differentiates), "")
    if objective.teacher and objective.exact_penalties:
        own = own or "teacher"
    if shrink > 1 and own:
        problem, detail = f"must be 1 with objective.{own}", "D is differentiated with all real images then"
        remedy = "remove it" + (", or set form=finite_difference" if own == "teacher" else "")
        raise UserError(f"objective.{first}.batch_shrink", shrink, problem, remedy, detail)
    if shrink > 1 and discriminator.compares_images:
        is_inexact = not getattr(discriminator, "exact", True)
        key = "exact=false" if is_inexact else f"family={discriminator.family}"
        raise compares_images(objective, f"discriminator.{key}")


def compares_images(objective: Objective, discriminator: str) -> UserError:
    """Return the error that a D compares images: of a part of them it would compute other logits."""
    field, problem = f"objective.{next(iter(objective.penalties))}.batch_shrink", f"must be 1 with {discriminator}"
    remedy = "remove it, or give D neither batch norm nor minibatch deviation"
    return UserError(field, objective.batch_shrink, problem, remedy, "this D compares images")
