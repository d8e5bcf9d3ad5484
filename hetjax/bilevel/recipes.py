"""The methods of the literature as expressions of the three families.

    estimator = RECIPES["rhg"].make(optax.sgd(0.1), 100)
    cost = RECIPES["rhg"].cost(optax.sgd(0.1), 100, x)

`tx` is the optimiser of the lower level and T the number of its steps. Other numbers have the
names and defaults of the paper or of a common setting. The survey that sorts the methods: Liu, Gao,
Zhang, Meng, Lin, "Investigating bi-level optimization for learning and vision from a unified
perspective", 2021, arXiv 2101.11517.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from hetjax.bilevel import machine
from hetjax.bilevel.implicit import implicit
from hetjax.bilevel.lower import Optimizer, aggregate, descent
from hetjax.bilevel.multipliers import Multiplier, barrier, dynamic, exterior, growing, ramp
from hetjax.bilevel.problem import Cost
from hetjax.bilevel.solvers import cg, neumann, one_step, rank_one, scaled
from hetjax.bilevel.trajectory import Learned
from hetjax.bilevel.unroll import unroll
from hetjax.bilevel.value_gap import value_gap
from hetjax.types import PyTree


class Recipe(NamedTuple):
    """A method of the literature."""

    make: Callable[..., machine.Estimator]  # `(tx, T, **numbers) -> estimator`
    name: str
    paper: str
    assumes: str  # what its paper assumes of the lower level, for what it proves
    learns_start: bool = False  # x is a `Learned`

    def cost(self, tx: Optimizer, num_steps: int, x: PyTree) -> Cost:
        """The cost of one hypergradient with the usual numbers; in forward mode it depends on x.

        Args:
            tx: the optimiser of the lower level.
            num_steps: T, its steps.
            x: the upper variable, only for its shapes.
        """
        return machine.cost(self.make(tx, num_steps).program(x))


def per_coordinate(x: PyTree) -> optax.GradientTransformation:
    """Descent with a learning rate for each number of y: `x["rates"]`.

    Args:
        x: the upper variable; `x["rates"]` has the tree and the shapes of y.

    Returns:
        An optax optimiser of y without state.
    """
    return optax.stateless(
        lambda updates, _: jax.tree.map(lambda rate, u: -rate * u, x["rates"], updates)
    )


def _falls(start: float) -> Callable[[Any], Any]:
    return lambda k: start / (k + 1.0) ** 0.25


def _grows(start: float, power: float) -> Multiplier:
    return growing(lambda k: start * (k + 1.0) ** power)


_CONVEX = "strongly convex in y"
_ANY = "a continuous loss on a compact set; no convexity"
_PL = "Polyak-Lojasiewicz in y; no convexity"

RECIPES: dict[str, Recipe] = {
    # --- Explicit gradients ---
    "fhg": Recipe(
        lambda tx, T: unroll(descent(tx), T, mode="forward"),
        "FHG, forward hypergradient",
        "Franceschi, Donini, Frasconi, Pontil, 2017, arXiv 1703.01785",
        _CONVEX,
    ),
    "rhg": Recipe(
        lambda tx, T: unroll(descent(tx), T),
        "RHG, reverse hypergradient",
        "Franceschi, Donini, Frasconi, Pontil, 2017, arXiv 1703.01785",
        _CONVEX,
    ),
    "truncated_rhg": Recipe(
        lambda tx, T, K=None: unroll(descent(tx), T, back=max(T // 2, 1) if K is None else K),
        "T-RHG, truncated reverse hypergradient",
        "Shaban, Cheng, Hatch, Boots, 2018, arXiv 1810.10667",
        _CONVEX,
    ),
    "one_stage": Recipe(
        lambda tx, T: unroll(descent(tx), 1),
        "one stage; DARTS of the second order (T is 1)",
        "Liu, Simonyan, Yang, 2018, arXiv 1806.09055",
        "one step reaches the minimum; a heuristic",
    ),
    "darts": Recipe(
        lambda tx, T: implicit(descent(tx), 1, solve=one_step(), cross="fd"),
        "DARTS by finite differences (T is 1; the cross product is taken after the step)",
        "Liu, Simonyan, Yang, 2018, arXiv 1806.09055",
        "one step reaches the minimum; a heuristic",
    ),
    "darts_first_order": Recipe(
        lambda tx, T: unroll(descent(tx), 1, back=0),
        "DARTS of the first order: alternating descent; 0 where F has no x of its own (T is 1)",
        "Liu, Simonyan, Yang, 2018, arXiv 1806.09055",
        "y does not depend on x; a heuristic",
    ),
    "maml": Recipe(
        lambda tx, T: unroll(descent(tx), T, start="learned"),
        "MAML",
        "Finn, Abbeel, Levine, 2017, arXiv 1703.03400",
        "none: the steps themselves are differentiated",
        learns_start=True,
    ),
    "fomaml": Recipe(
        lambda tx, T: unroll(descent(tx), T, start="learned", back=0),
        "FOMAML, MAML of the first order",
        "Finn, Abbeel, Levine, 2017, arXiv 1703.03400",
        "small steps",
        learns_start=True,
    ),
    "reptile": Recipe(
        lambda tx, T: unroll(descent(tx), T, start="learned", mode="displacement"),
        "Reptile: no upper loss, the start follows the steps",
        "Nichol, Achiam, Schulman, 2018, arXiv 1803.02999",
        "small steps",
        learns_start=True,
    ),
    "meta_sgd": Recipe(
        lambda tx, T: unroll(descent(per_coordinate), T, start="learned"),
        "Meta-SGD: a learning rate for each number, `x = Learned({'rates': …}, start)`",
        "Li, Zhou, Chen, Li, 2017, arXiv 1707.09835",
        "none: the steps themselves are differentiated",
        learns_start=True,
    ),
    "bda": Recipe(
        lambda tx, T, mu=0.5: unroll(aggregate(tx, mu=mu), T),
        "BDA, bilevel descent aggregation",
        "Liu, Mu, Yuan, Zeng, Zhang, 2020, arXiv 2006.04045",
        "convex in y, many minima; F strongly convex in y",
    ),
    "iaptt": Recipe(
        lambda tx, T: unroll(descent(tx), T, start="learned", pick="worst"),
        "IAPTT-GM, learned start and worst iterate",
        "Liu, Liu, Zeng, Zhang, 2021, arXiv 2110.00455",
        _ANY,
        learns_start=True,
    ),
    # --- Implicit gradients ---
    "cg": Recipe(
        lambda tx, T, Q=10, damp=0.0: implicit(descent(tx), T, solve=cg(Q, damp)),
        "HOAG, conjugate gradients",
        "Pedregosa, 2016, arXiv 1602.02355",
        _CONVEX,
    ),
    "neumann": Recipe(
        lambda tx, T, Q=10, eta=0.1: implicit(descent(tx), T, solve=neumann(Q, eta), warm=False),
        "Neumann series",
        "Lorraine, Vicol, Duvenaud, 2019, arXiv 1911.02590",
        _CONVEX,
    ),
    "t1_t2": Recipe(
        lambda tx, T, eta=0.1: implicit(descent(tx), 1, solve=scaled(eta)),
        "T1-T2: the identity for the inverse (T is 1)",
        "Luketina, Berglund, Greff, Raiko, 2015, arXiv 1511.06727",
        "curvature near a multiple of the identity",
    ),
    "sama": Recipe(
        lambda tx, T: implicit(descent(tx), T, solve=one_step(), cross="fd"),
        "SAMA: the optimiser's own scaling for the inverse, finite differences",
        "Choe, Mehta, Ahn, Neiswanger, Xie, Strubell, Xing, 2023, arXiv 2310.05674",
        "curvature near the inverse of the optimiser's scaling",
    ),
    "soba": Recipe(
        lambda tx, T, eta=0.1: implicit(descent(tx), 1, solve=neumann(1, eta)),
        "SOBA: one step of y, one of the warm linear system (T is 1)",
        "Dagréou, Ablin, Vaiter, Moreau, 2022, arXiv 2201.13409",
        _CONVEX,
    ),
    "iga": Recipe(
        lambda tx, T, damp=0.1: implicit(descent(tx), T, solve=rank_one(damp)),
        "IGA: the outer product of the lower gradient for the Hessian",
        "known by that name from the toolbox BOAT; no paper is quoted here",
        "the lower gradient is not 0",
    ),
    # --- Value functions ---
    "bvfim": Recipe(
        lambda tx, T, sigma=0.1, shift=0.1, ridge=1e-3: value_gap(
            descent(tx), T, multiplier=barrier(_falls(sigma), _falls(shift), ridge=_falls(ridge))
        ),
        "BVFIM, interior points of the value function",
        "Liu, Liu, Yuan, Zeng, Zhang, 2021, arXiv 2106.07991",
        _ANY,
    ),
    "bvfsm": Recipe(
        lambda tx, T, sigma=0.1: value_gap(descent(tx), T, multiplier=exterior(_falls(sigma))),
        "BVFSM, sequential minimisation, by a quadratic penalty",
        "Liu, Liu, Zeng, Zhang, 2021, arXiv 2110.04974",
        _ANY,
    ),
    "bome": Recipe(
        lambda tx, T, eta=0.5: value_gap(descent(tx), T, multiplier=dynamic(eta)),
        "BOME",
        "Ye, Liu, Wright, Stone, Liu, 2022, arXiv 2209.08709",
        _PL,
    ),
    "f2sa": Recipe(
        lambda tx, T, start=1.0, power=1 / 7: value_gap(
            descent(tx), T, multiplier=_grows(start, power)
        ),
        "F2SA, a growing multiplier",
        "Kwon, Kwon, Wright, Nowak, 2023, arXiv 2301.10945",
        _CONVEX,
    ),
    "f2sa_central": Recipe(
        lambda tx, T, multiplier=10.0: value_gap(
            descent(tx), T, multiplier=multiplier, central=True
        ),
        "F2SA-p with p = 2: a central difference",
        "2025, arXiv 2509.02937",
        _CONVEX + ", smooth of a higher order",
    ),
    "v_pbgd": Recipe(
        lambda tx, T, stop=10.0, steps=1000: value_gap(
            descent(tx), 1, multiplier=ramp(0.0, stop, steps), upper_steps=1
        ),
        "V-PBGD, a ramp to a constant multiplier (T is 1)",
        "Shen, Chen, 2023, arXiv 2302.05185",
        _PL,
    ),
    "meha": Recipe(
        lambda tx, T, start=1.0, power=0.3, gamma=1.0: value_gap(
            descent(tx), 1, multiplier=_grows(start, power), upper_steps=1, prox=gamma
        ),
        "MEHA, the gap of the Moreau envelope (T is 1)",
        "Liu, Liu, Yao, Zeng, Zhang, 2024, arXiv 2405.09927",
        "weakly convex in y",
    ),
}


def table(tx: Optimizer, num_steps: int, x: PyTree, *, start: Any = None) -> str:
    """What each recipe asks for in one hypergradient, as Markdown, counted in its program.

    Args:
        tx, num_steps: of the lower level.
        x: the upper variable.
        start: a start of the lower level, for recipes that learn it; None leaves them out.
    """
    lines = [
        "| recipe | method | losses | gradients | Hessian products | cross products | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, recipe in RECIPES.items():
        if recipe.learns_start and start is None:
            continue
        given = Learned(x, start) if recipe.learns_start else x
        cost = recipe.cost(tx, num_steps, given)
        cells = [f"`{key}`", recipe.name, *map(str, vars(cost).values()), recipe.paper]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
