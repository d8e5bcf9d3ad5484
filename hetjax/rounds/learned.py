"""What the quota policy of a run knows, and how another run goes on with it."""

from typing import Any

from hetjax import messages
from hetjax.checkpoints import checkpoint, leaves
from hetjax.config import experiment as config_lib
from hetjax.rounds import run_state
from hetjax.rounds import setup as setup_lib

PLACE = "run/policies"  # among the arrays of a checkpoint


def policy_of(setup: setup_lib.Setup) -> dict[str, Any]:
    """The quota policy of a run, as a checkpoint tells of it: its name and options."""
    quota = config_lib.to_dict(setup.config)["quota"]
    return {name: value for name, value in quota.items() if name != "max_microbatches"}


def of(rounds: run_state.RoundsState, setup: setup_lib.Setup) -> dict[str, Any]:
    """What the quota policy knows, and of what."""
    config = setup.config
    of = len(setup.where.devices), config.budget, config.microbatch_size, policy_of(setup)
    return {"of": of, "policies": rounds.policies}


def into(
    rounds: run_state.RoundsState, found: dict[str, Any], setup: setup_lib.Setup
) -> run_state.RoundsState:
    """A run's rounds, with the quotas of another one where both are alike."""
    own = of(rounds, setup)
    if found["of"] == own["of"] and found["policies"].keys() == own["policies"].keys():
        return rounds._replace(policies=found["policies"])
    if setup.where.leads:
        messages.say("quotas are learnt anew: workers, budget, microbatch_size or policy differ")
    return rounds


def from_checkpoint(
    saved: checkpoint.Saved, fresh: dict[str, Any], setup: setup_lib.Setup
) -> dict[str, Any]:
    """What the policy knew; one that is another than in the checkpoint begins anew, which is told.

    A checkpoint of an older version does not tell of its policy: there its state has to fit.
    """
    now, before = policy_of(setup), saved.about.get("quota")
    if before in (None, now):
        try:
            return leaves.unflatten(fresh, saved.arrays, PLACE)
        except ValueError:
            before = None
    if setup.where.leads:
        was = "with another state" if before is None else f"{before['policy']!r}"
        if before is not None and before["policy"] == now["policy"]:
            was += " with other options"
        messages.say(
            f"quota.policy={now['policy']!r} begins anew and learns from this round on: "
            f"in the checkpoint of round {saved.about['rounds']} the policy is {was}"
        )
    return fresh
