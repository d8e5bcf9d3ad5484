"""Bilevel optimisation: gradients of `F(x, y(x))`, y(x) a minimum of `f(x, .)`, in three families.

- `unroll` differentiates the lower steps: `trajectory` is what it carries, `forwards` and `reverse`
  are its modes.
- `implicit` differentiates the condition that y is at a minimum; `solvers` solve its linear system.
- `value_gap` penalises how far the lower loss is from its least value, by `multipliers`.
- `lower` has the lower dynamics, which all three take.
- `problem` says what a bilevel problem is and which sums are asked of it, over `batches`.
- `machine` is an estimator: a program that asks for these sums.
- `hypergradient` answers it on one device, under `jit`; `diagnosis` says what is wrong.
- `per_example` is for upper variables of one example each; `vectors` has sums of pytrees.
- `recipes` are the methods of the literature as expressions.

The user's own optimiser updates with the gradient. Imports `trees`, `types` and `weights`. Losses,
x, y and batches come in; a gradient like x, a state and what was found go out.
"""

from hetjax.bilevel.batches import Batches, Blocks, Stack
from hetjax.bilevel.diagnosis import check, explain
from hetjax.bilevel.hypergradient import hypergradient
from hetjax.bilevel.implicit import implicit
from hetjax.bilevel.lower import Lower, aggregate, descent
from hetjax.bilevel.machine import Ask, Estimator, Info, Repeat, Result, State, Then
from hetjax.bilevel.multipliers import Multiplier, barrier, const, dynamic, exterior, growing, ramp
from hetjax.bilevel.per_example import PerExample
from hetjax.bilevel.problem import Answer, At, Bilevel, Cost, Kind, What
from hetjax.bilevel.recipes import RECIPES, Recipe, per_coordinate
from hetjax.bilevel.solvers import Solver, cg, neumann, one_step, rank_one, scaled
from hetjax.bilevel.trajectory import Learned
from hetjax.bilevel.unroll import unroll
from hetjax.bilevel.value_gap import value_gap

__all__ = [
    "RECIPES",
    "Answer",
    "Ask",
    "At",
    "Batches",
    "Bilevel",
    "Blocks",
    "Cost",
    "Estimator",
    "Info",
    "Kind",
    "Learned",
    "Lower",
    "Multiplier",
    "PerExample",
    "Recipe",
    "Repeat",
    "Result",
    "Solver",
    "Stack",
    "State",
    "Then",
    "What",
    "aggregate",
    "barrier",
    "cg",
    "check",
    "const",
    "descent",
    "dynamic",
    "explain",
    "exterior",
    "growing",
    "hypergradient",
    "implicit",
    "neumann",
    "one_step",
    "per_coordinate",
    "ramp",
    "rank_one",
    "scaled",
    "unroll",
    "value_gap",
]
