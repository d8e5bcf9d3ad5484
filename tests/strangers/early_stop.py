"""The run ends when the validation loss does not fall any more."""

import net
import optax
from flax import nnx

import hetjax

hetjax.use_cpu_workers(4)
loss_fn, params = hetjax.nnx_loss(net.Net(nnx.Rngs(0)), net.loss)
best, since = float("inf"), 0


def stop_early(report):
    global best, since
    if report.eval is None:
        return None
    since = 0 if report.eval["test_loss"] < best - 1e-3 else since + 1
    best = min(best, report.eval["test_loss"])
    return hetjax.STOP if since >= 2 else None


how = {"epochs": 100, "eval_source": net.data, "callbacks": [stop_early], **net.sizes}
result = hetjax.fit(loss_fn, params, optax.adam(0.1), net.data, **how)
assert result.summary["stopped_by"] == "callback stop_early"
assert result.summary["epochs"] < 100
