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

from hetjax.bilevel.batches import Batches as Batches
from hetjax.bilevel.batches import Blocks as Blocks
from hetjax.bilevel.batches import Stack as Stack
from hetjax.bilevel.diagnosis import check as check
from hetjax.bilevel.diagnosis import explain as explain
from hetjax.bilevel.hypergradient import hypergradient as hypergradient
from hetjax.bilevel.implicit import implicit as implicit
from hetjax.bilevel.lower import Lower as Lower
from hetjax.bilevel.lower import aggregate as aggregate
from hetjax.bilevel.lower import descent as descent
from hetjax.bilevel.machine import Ask as Ask
from hetjax.bilevel.machine import Estimator as Estimator
from hetjax.bilevel.machine import Info as Info
from hetjax.bilevel.machine import Repeat as Repeat
from hetjax.bilevel.machine import Result as Result
from hetjax.bilevel.machine import State as State
from hetjax.bilevel.machine import Then as Then
from hetjax.bilevel.multipliers import Multiplier as Multiplier
from hetjax.bilevel.multipliers import barrier as barrier
from hetjax.bilevel.multipliers import const as const
from hetjax.bilevel.multipliers import dynamic as dynamic
from hetjax.bilevel.multipliers import exterior as exterior
from hetjax.bilevel.multipliers import growing as growing
from hetjax.bilevel.multipliers import ramp as ramp
from hetjax.bilevel.per_example import PerExample as PerExample
from hetjax.bilevel.problem import Answer as Answer
from hetjax.bilevel.problem import At as At
from hetjax.bilevel.problem import Bilevel as Bilevel
from hetjax.bilevel.problem import Cost as Cost
from hetjax.bilevel.problem import Kind as Kind
from hetjax.bilevel.problem import What as What
from hetjax.bilevel.recipes import RECIPES as RECIPES
from hetjax.bilevel.recipes import Recipe as Recipe
from hetjax.bilevel.recipes import per_coordinate as per_coordinate
from hetjax.bilevel.solvers import Solver as Solver
from hetjax.bilevel.solvers import cg as cg
from hetjax.bilevel.solvers import neumann as neumann
from hetjax.bilevel.solvers import one_step as one_step
from hetjax.bilevel.solvers import rank_one as rank_one
from hetjax.bilevel.solvers import scaled as scaled
from hetjax.bilevel.trajectory import Learned as Learned
from hetjax.bilevel.unroll import unroll as unroll
from hetjax.bilevel.value_gap import value_gap as value_gap
