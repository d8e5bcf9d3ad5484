"""Which process leads a run in its workdir? One at a time, from its start or in another's place."""

import contextlib
import pathlib
from typing import Any

from hetjax.checkpoints import generations
from hetjax.comm import key_value_store as store_lib
from hetjax.config import recorded
from hetjax.records import lock, workdir
from hetjax.rounds import resume as resume_lib
from hetjax.rounds import setup as setup_lib

_PATIENCE_SECS = 600.0  # until the first leader has looked what is in the workdir


class Leading:
    """What a process knows of it.

    Args:
        stack: lets go of the workdir, after the run.
        directory: the workdir; None: nothing is kept.
        setup: of the run.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        directory: pathlib.Path | None,
        setup: setup_lib.Setup,
    ) -> None:
        self._stack, self._directory, self._setup = stack, directory, setup
        self.lead: generations.Lead | None = None
        self.generation: dict[str, Any] = {}
        """This start of the run; the same in all processes."""

    def hold(self) -> None:
        """Holds the workdir, in the process that leads, before it looks what is there.

        Raises:
            ValueError: another run holds it, or it cannot be used.
        """
        assert self._directory is not None
        self._held = self._stack.enter_context(lock.held(workdir.made_directory(self._directory)))
        self._before = self._newest()

    def begin(self, step: int | None) -> None:
        """A generation begins, which goes on from a step, or anew; all processes call it."""
        alone = self._setup.company.communicator.alone
        store = None if alone else store_lib.KeyValueStore("generation")
        if self._setup.where.leads:
            # Of a leader in whose place this one was started, before the first round.
            begun = (store and store.read("begun")) or {"run_id": ""}
            is_same = begun["run_id"] == self._before.run_id
            self._held.lead = self._lead(step, begun["run_id"] if is_same else "")
            if store is not None:
                store.post("begun", self.generation)
        elif store is not None:
            self.generation = store.wait("begun", _PATIENCE_SECS, what="begin the run")

    def take_over(self, step: int) -> None:
        """Leads in the place of another process of the run, which may be stopped and wake later.

        Args:
            step: that this process has reached.

        Raises:
            ValueError: another one leads already, of this run or of the call repeated.
        """
        assert self._directory is not None
        self._before, run_id = self._newest(), self.generation["run_id"]
        if self._before.run_id != run_id or self._before.step > step:
            raise ValueError(lock.in_use(self._directory, self._before.process))
        self._stack.enter_context(lock.held(self._directory, self._lead(step, run_id)))

    @property
    def written_by(self) -> dict[str, Any]:
        """What a checkpoint tells of its writer: the start of the run, and which process."""
        return self.generation | {"incarnation": self._setup.company.communicator.incarnation}

    def leads(self) -> bool:
        """Whether this process leads still, of one that leads or has led."""
        return self.lead is None or self.lead.leads()

    def _newest(self) -> generations.Begun:
        assert self._directory is not None
        return generations.newest(self._directory / resume_lib.DIRECTORY)

    def _lead(self, step: int | None, run_id: str = "") -> generations.Lead:
        assert self._directory is not None
        try:
            self.lead = generations.Lead(
                self._directory / resume_lib.DIRECTORY,
                self._before,
                step=step,
                run_id=run_id,
                incarnation=self._setup.company.communicator.incarnation,
            )
        except OSError as error:
            raise recorded.unusable(self._directory, error) from error
        self.generation = self.lead.about
        return self.lead
