"""What do quotas cost and give in real training? Figures of whole runs, with JAX.

Emulated workers sleep to their times on the wall clock; and what is compiled while quotas change.
"""

from typing import Any

import jax
import numpy as np
import optax

import hetjax
from experiments import problems
from experiments.benchmarks.rows import Row


def emulated_rows(round_secs: float = 0.2, num_rounds: int = 12, skipped: int = 3) -> list[Row]:
    """Mean round on the wall clock in steady state over the exact optimum for the true speeds."""
    rows = []
    loss_fn, params = problems.classifier("logistic", (8, 8, 1), input_max=16.0)
    for num_workers in (2, 4, 8):
        reached = []
        for ratio in (1, 2, 4, 8):
            secs = ratio ** (np.arange(num_workers) / (num_workers - 1))
            budget = 8 * num_workers
            secs *= round_secs / budget * (1 / secs).sum()
            result = hetjax.fit(
                loss_fn,
                params,
                optax.sgd(0.1),
                problems.images(16 * budget * num_rounds, (8, 8, 1)),
                epochs=1,
                microbatch_size=16,
                budget=budget,
                cluster={"num_workers": num_workers, "secs_per_microbatch": tuple(secs)},
                progress=False,
            )
            lines = result.history[skipped:]
            optimum = sum(line["optimal_round_secs"] for line in lines)
            reached.append(optimum / sum(line["round_secs"] for line in lines))
            assert result.summary["overrun_fraction"] <= 0.01
        rows.append(
            Row(
                f"steady state on the wall clock, training, rounds of {round_secs * 1e3:.0f} ms, "
                f"emulated, n = {num_workers}: least, and at 1:1, 2:1, 4:1, 8:1",
                "≥ 97 %",
                f"{min(reached):.1%} ({', '.join(f'{r:.1%}' for r in reached)})",
            )
        )
    return rows


def compilation_rows() -> list[Row]:
    """Programs compiled after the first round while quotas, workers and speeds change."""
    loss_fn, params = problems.classifier("logistic", (8, 8, 1), input_max=16.0)
    counts: list[str] = []

    def on_event(name: str, duration: float, **kwargs: Any) -> None:
        del duration, kwargs
        if name == "/jax/core/compile/backend_compile_duration":
            counts.append(name)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        rows = []
        for local in ("stepped", "fused", "virtual"):
            began: list[int] = []

            def note(line: Any, began: list[int] = began) -> None:
                if line.round == 0:
                    began.append(len(counts))

            result = hetjax.fit(
                loss_fn,
                params,
                optax.sgd(0.1),
                problems.images(1000, (8, 8, 1)),
                epochs=4,
                microbatch_size=8,
                budget=16,
                local=local,
                cluster={
                    "num_workers": 4,
                    "secs_per_microbatch": (1.0, 2.0, 3.0, 4.0),
                    "clock": "virtual",
                    "changes": (
                        {"round": 6, "worker": 0, "secs_per_microbatch": 50.0},
                        {"round": 12, "worker": 1, "present": False},
                        {"round": 18, "worker": 1, "present": True},
                    ),
                },
                callbacks=[note],
                progress=False,
            )
            quotas = {tuple(line["quotas"]) for line in result.history}
            rows.append(
                Row(
                    f"compilations after the first round, {local}, {len(quotas)} different quotas",
                    "0",
                    str(len(counts) - began[0]),
                )
            )
        return rows
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)
