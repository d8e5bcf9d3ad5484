"""Programs that reuse the memory of an argument, and may be compiled before they are called."""

import collections
import threading
from collections.abc import Callable
from typing import Any

import jax

from hetjax import executor, types


class InPlace:
    """A function, jitted; what it makes may lie where one of its arguments lay.

    The argument is donated where each of its arrays has one of the same size among the results,
    which the first call decides; else it stays, since JAX warns of arrays that find no use.

    Args:
        function: what is jitted.
        argnum: of the argument that is not needed any more; None: all are.
        lay: from what is made, in shapes, to its shardings; None: JAX finds them.

    Attributes:
        call: the program. JAX's own from the second call on.
    """

    def __init__(
        self, function: Callable, argnum: int | None, lay: Callable[[Any], Any] | None = None
    ) -> None:
        self._function, self._argnum, self._lay = function, argnum, lay
        self._jitted: Any = None
        self._ahead: threading.Thread | None = None
        self.call: Callable = self._first_call

    def _first_call(self, *args: Any) -> Any:
        if self._ahead is not None:
            self._ahead.join()
            self._ahead = None
        if self._jitted is None:
            self._jitted = self._decide(args)
        self.call = executor.compiled_now(self._jitted)
        return self.call(*args)

    def compile_ahead(self, *args: Any) -> None:
        """Begins to compile in a thread, for arrays or `jax.ShapeDtypeStruct`s as the call has.

        The call waits for it, and so does the end of the process: Python cannot end under a
        compiler. What goes wrong in the thread goes wrong in the call, too, which says so.
        """
        if self._jitted is None and self._ahead is None:
            self._ahead = threading.Thread(target=self._compile, args=args, name="hetjax-compiling")
            self._ahead.start()

    def _compile(self, *args: Any) -> None:
        try:
            self._jitted = self._decide(args)
            self._jitted.lower(*args).compile()  # JAX keeps it for the call
        except Exception:
            self._jitted = None

    @executor.compiled
    def _decide(self, args: tuple) -> Any:
        made, donated = jax.eval_shape(self._function, *args), self._argnum
        if donated is not None and not _sizes(args[donated]) <= _sizes(made):
            donated = None
        laid = self._lay(made) if self._lay else None
        return jax.jit(self._function, donate_argnums=donated, out_shardings=laid)


def _sizes(tree: types.PyTree) -> collections.Counter:
    return collections.Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))
