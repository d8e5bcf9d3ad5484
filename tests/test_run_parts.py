"""`hetjax.Run` with the user's own parts: as objects, names and dicts, equal to `fit`."""

import jax
import numpy as np
import optax
import pytest

import hetjax
from tests.own_parts import gate, local_sgd, order, policy, reducer
from tests.rounds import problems

OBJECTS = {
    "quota": policy.one_at_a_time(least=2),
    "ordering": order.rotated(by=3),
    "reducer": reducer.rounded_sum(),
    "gate": gate.after(3),
}
NAMED = {  # the same, as a command line or a configuration names them
    "quota": {"policy": "tests.own_parts.policy:one_at_a_time", "least": 2},
    "ordering": {"method": "tests.own_parts.order:rotated", "arguments": {"by": 3}},
    "reducer": "tests.own_parts.reducer:rounded_sum",
    "gate": {"trigger": "tests.own_parts.gate:after", "most": 3},
}
SPEEDS = (1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize("local", ["stepped", "fused", "virtual"])
@pytest.mark.parametrize("with_rule", [False, True])
def test_a_run_takes_own_parts_as_fit_does(local, with_rule):
    """Quotas are those of `fit`, and the state of all workers too, to the bit."""
    data, weights = problems.classification(61, np.float32), problems.initial_weights(np.float32)
    cluster = {"num_workers": 4, "secs_per_microbatch": SPEEDS, "clock": "virtual"}
    fields = {"epochs": 4, "cluster": cluster, "local": local, "budget": 12, "microbatch_size": 4}
    optimizer, objects, named = optax.sgd(0.3), OBJECTS, NAMED
    if with_rule:
        inner = optax.sgd(0.1, momentum=0.9)
        fields["rule"] = local_sgd.local_sgd(problems.softmax_loss, inner)
    if local == "fused":  # which has no gate
        objects, named = ({n: p for n, p in g.items() if n != "gate"} for g in (objects, named))
    fitted = problems.fit(data, weights, optimizer=optimizer, **fields, **objects)
    for parts in (objects, named):
        with hetjax.Run(problems.softmax_loss, weights, optimizer, data, **fields, **parts) as run:
            state, quotas = run.init(), []
            while not run.done(state):
                state, report = run.round(state)
                quotas.append(report.read().quotas)
            assert quotas == [line["quotas"] for line in fitted.history]
            jax.tree.map(np.testing.assert_array_equal, state.train, fitted.state)
    assert len({tuple(each) for each in quotas}) > 2
