"""The algorithm of a run.

Each step goes once round the ring:
1. roll out: the engines, which serve the current weights, make trajectories, and these are scored;
2. prepare: groups without a signal are dropped, the others get advantages and are packed into updates;
3. log-probs: the trainer recomputes what the engines reported; the difference is measured and limited;
4. train: one optimizer update per share of the groups;
5. resync: the engines take the new weights as the next version, and what they loaded is verified.

A checkpoint that is due comes before the evaluation of its step, which may fail; a resumed run makes up for that.
"""

from slimrl.runtime.train_run import TrainRun


def train(run: TrainRun) -> None:
    """Steps until the recipe's number is reached; evaluations and checkpoints lie between them."""
    learner = run.learner
    run.meet_engines()
    while run.goes_on:
        with run.next_step() as step:
            with step.timed("rollout"):
                trajectories = run.rollout(step)
            updates = learner.prepare(step, trajectories)
            with step.timed("logprobs"):
                learner.compute_old_logprobs(step, updates)
            with step.timed("train"):
                learner.train(step, updates)
            with step.timed("resync"):
                run.resync(step)
        if run.checkpoint_is_due():
            run.save_checkpoint()
        if run.evaluation_is_due():
            run.evaluate()
    run.finish()
