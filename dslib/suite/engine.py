"""The papermill engine: what NBClientEngine does, with progress, deadlines and honest errors."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.log import logger
from papermill.translators import PythonTranslator, papermill_translators

from dslib.suite import outputs
from dslib.suite.parameters import literal

ENGINE = "dslib"
START_ATTEMPTS = 3
START_TIMEOUT = 60
# What one stream of one cell may print before the rest is only counted.
STREAM_LIMIT = 2_000_000


class NotebookExit(RuntimeError):
    """A cell called ``exit()`` or ``quit()``: what stands below it would run all the same, and say nothing of it."""


class KernelStartError(RuntimeError):
    """The kernel did not come up, several times in a row."""


@dataclass
class Watch:
    """What a run shares with the engine: where progress goes, when time is up, what came out."""

    emit: Callable[..., None]
    seconds: float
    notebook: Any = None  # the notebook being executed, as far as it came
    cell: int | None = None
    deadline: float = field(default=math.inf, init=False)

    def start(self) -> None:
        """The kernel is up: the notebook's own time begins."""
        self.deadline = time.monotonic() + self.seconds
        self.emit("ready")

    def left(self) -> int:
        """Whole seconds that are left, at least one: what the next cell may take."""
        return max(1, math.ceil(self.deadline - time.monotonic()))


class ExactTranslator(PythonTranslator):
    """Writes injected parameters as the literals they are: tuples, sets and integer keys too."""

    @classmethod
    def translate(cls, val: Any) -> str:
        return literal(val)


class Client(PapermillNotebookClient):
    """Executes the cells; stops at the first error and raises it."""

    def __init__(self, nb_man: Any, watch: Watch, **kwargs: Any) -> None:
        super().__init__(nb_man, **kwargs)
        self.watch = watch
        self.streamed: Counter[tuple[int, str]] = Counter()
        self.left_out: dict[int, Counter[str]] = {}
        self.exited = False
        self.on_cell_executed = self._look_for_exit

    @contextmanager
    def setup_kernel(self, **kwargs: Any):
        # Two kernels that start at once can be given the same ports. Only this start is
        # repeated: a cell that ran may have had effects.
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self.create_kernel_manager()
                self.start_new_kernel(**kwargs)
                self.start_new_kernel_client()
                break
            except (RuntimeError, OSError) as error:
                if attempt == START_ATTEMPTS:
                    raise KernelStartError(
                        f"the kernel did not start in {attempt} attempts: {error}"
                    ) from error
                self.km = self.kc = None
        with super().setup_kernel(**kwargs):
            try:
                yield
            except BaseException:
                # A kernel that hangs would only use up its grace period.
                self.shutdown_kernel = "immediate"
                raise

    def papermill_execute_cells(self) -> None:
        self.watch.start()
        total = len(self.nb.cells)
        section = ""
        for index, cell in enumerate(self.nb.cells):
            self.watch.cell = index
            if cell.cell_type == "code":
                self.watch.emit(
                    "cell", index=index + 1, of=total, section=section, head=headline(cell.source)
                )
            elif cell.source.startswith("#"):
                section = headline(cell.source)
            try:
                self.execute_cell(cell, index)
                if self.exited:
                    raise NotebookExit(
                        "the cell called exit(), which ends no notebook; raise an error instead"
                    )
            except CellExecutionError:
                if not self._unsolved_exercise(cell):
                    raise
            finally:
                if cell.cell_type == "code":
                    cell.outputs = outputs.tidy(cell.outputs, self.left_out.get(index))
        self.watch.cell = None

    def _look_for_exit(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        # The kernel only asks its frontend to close; nbclient does not listen.
        payload = (execute_reply or {}).get("content", {}).get("payload", [])
        self.exited = self.exited or any(part.get("source") == "ask_exit" for part in payload)

    def _unsolved_exercise(self, cell: Any) -> bool:
        return "raises-exception" in (cell.metadata.get("tags") or [])

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "stream":
            name, text = msg["content"]["name"], msg["content"]["text"]
            self.streamed[cell_index, name] += len(text)
            if self.streamed[cell_index, name] > STREAM_LIMIT:
                self.left_out.setdefault(cell_index, Counter())[name] += len(text)
                return None
            if len(cell.outputs) > 200:
                cell.outputs = _joined(cell.outputs)
        return super().process_message(msg, cell, cell_index)


class Engine(NBClientEngine):
    """Registered with papermill under the name ``dslib``."""

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, watch: Watch, **kwargs: Any) -> Any:
        watch.notebook = nb_man.nb
        client = Client(
            nb_man,
            watch,
            kernel_name=kernel_name,
            timeout_func=lambda cell: watch.left(),
            startup_timeout=START_TIMEOUT,
            record_timing=False,
            iopub_timeout=60,
            log=logger,
        )
        return client.execute()


def register() -> None:
    """Make the engine and the exact translator known to papermill, in this process."""
    papermill_engines.register(ENGINE, Engine)
    for name in ("python", "python3"):
        papermill_translators.register(name, ExactTranslator)


def headline(source: str) -> str:
    """The first line of a cell that says something: what a progress display shows."""
    lines = [line.strip() for line in source.splitlines()]
    return next((line.lstrip("# ") for line in lines if line.strip("# ")), "")[:80]


def _joined(items: list[Any]) -> list[Any]:
    """Neighbouring pieces of one stream joined, so that a chatty cell stays cheap while it runs."""
    joined: list[Any] = []
    for item in items:
        before = joined[-1] if joined else None
        if before is not None and item["output_type"] == before["output_type"] == "stream":
            if item["name"] == before["name"]:
                before["text"] += item["text"]
                continue
        joined.append(item)
    return joined


__all__ = [
    "ENGINE",
    "CellExecutionError",
    "CellTimeoutError",
    "DeadKernelError",
    "KernelStartError",
    "NotebookExit",
    "Watch",
]
