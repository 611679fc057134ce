"""The training loops: reinforcement learning, training on a trajectory file, supervised training.

Each step of reinforcement learning:
1. rollout: the engines serve the current weights and generate trajectories, which are scored; or those are taken that
   an asynchronous rollout has finished (`rollout.mode`);
2. prepare: the selected trajectories, which have their advantages, are dealt to updates; those that these need are
   packed;
3. log-probs: passes of the trainer for what the updates need, if anything (docs/algorithms.md);
4. train: the optimizer updates run one after another; before the first one changes the
   weights, the difference between the trainer's and the engines' log-probs is measured and limited;
5. resync: the engines load the new weights as the next version, and the loaded tensors are verified; before it come the
   waits for what the mode does not let run on, and for a background evaluation (`eval.engines`).

A step's checkpoint is saved before its evaluation, which may fail. A resumed run makes up for the evaluation.
"""

from collections.abc import Sequence

from slimrl.algorithms.selection import select
from slimrl.data.mixture import DataOrder
from slimrl.data.trajectory import Trajectory
from slimrl.rollout.group_filters import GroupFilters
from slimrl.runtime.learner import Learner
from slimrl.runtime.run import Run
from slimrl.runtime.sft import Example, update
from slimrl.runtime.train_run import TrainRun


def train(run: TrainRun) -> None:
    """Run the remaining steps of the recipe, with evaluations and checkpoints between them."""
    learner = run.learner
    run.sync_initial_weights()
    while run.should_continue:
        with run.next_step() as step:
            with step.timed("rollout"):
                selection = run.rollout(step)
            updates = learner.prepare(step, selection)
            with step.timed("logprobs"):
                learner.compute_inputs(step, updates)
            with step.timed("train"):
                learner.train(step, updates)
            run.before_resync(step)
            with step.timed("resync"):
                run.resync(step)
        if run.checkpoint_is_due():
            run.save_checkpoint()
        elif run.copy_is_due():
            run.save_copy()
        if run.export_is_due():
            run.export_step()
        if run.evaluation_is_due():
            run.evaluate()
    run.finish()


def train_on_file(run: Run, learner: Learner, trajectories: Sequence[Trajectory], keeps: GroupFilters) -> None:
    """Train on the same trajectories at every step; from the second step on they are of an older policy.

    Raises:
        RunError: a group filter failed; it is named.
    """
    while run.should_continue:
        with run.next_step() as step:
            updates = learner.prepare(step, select(trajectories, run.recipe.algorithm, keeps, step=step.number))
            with step.timed("logprobs"):
                learner.compute_inputs(step, updates)
            with step.timed("train"):
                learner.train(step, updates, enforce_limit=step.number == 1)
    run.finish()


def train_on_conversations(run: Run, examples: DataOrder[Example]) -> None:
    """Supervised: one optimizer update a step."""
    while run.should_continue:
        with run.next_step() as step, step.timed("train"):
            update(step, examples.take(run.recipe.sft.batch_conversations), run)
        if run.checkpoint_is_due():
            run.save_checkpoint()
        elif run.copy_is_due():
            run.save_copy()
        if run.export_is_due():
            run.export_step()
    run.finish()
