"""Memory of a critic's ranks, which are planned as the policy's are, on GPUs of their own.

Its output layer and logits are planned as the policy's, whose numbers they are far below: an upper bound.
"""

from dataclasses import replace

from slimrl.config.critic import critic_recipe
from slimrl.estimates.planner.facts import model_facts
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.layout_plan import LayoutPlan, plan_layout
from slimrl.estimates.planner.parameters import built_stages
from slimrl.models.offline_recipe import OfflineRecipe
from slimrl.trainer.layout.source_layout import planned_stages


def plan_critic(planned: OfflineRecipe, hardware: Hardware, *, mean_tokens: int | None) -> LayoutPlan | None:
    """The plan of the critic's ranks; None if the run has no critic.

    Raises:
        ValueError: the layout is impossible.
    """
    if planned.sft or not planned.recipe.has_critic:
        return None
    recipe = critic_recipe(planned.recipe)
    recipe = replace(recipe, rollout=replace(recipe.rollout, colocated=False))
    known = model_facts(replace(planned, loaded=replace(planned.loaded, recipe=recipe)))
    stages, layers = built_stages(recipe.trainer, known.model), planned_stages(recipe.trainer, known.model)
    plan = plan_layout(known, recipe, stages, layers, hardware, sft=False, mean_tokens=mean_tokens)
    return replace(plan, problems=[f"critic: {problem}" for problem in plan.problems])
