"""One notebook in a process of its own: ``python -m dslib.suite.worker job.json``.

Progress goes to standard output, one JSON object a line. The result is written to a file of
its own; the executed notebook takes its finished name only when everything went well.
Standard input is a lifeline: when it closes, the runner is gone and the worker ends too.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from dslib.runs.files import write_atomic, write_json
from dslib.suite import outputs, processes
from dslib.suite._nbformat import nbformat  # before papermill imports it the slow way
from dslib.suite.notebooks import NotebookError, clear, draws_figures, read_notebook


def main(job_file: str) -> int:
    """Execute the job and write its result; the exit status is 0 whether or not the notebook failed."""
    channel = _private_channel()
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    _end_on_signals()
    _end_with_the_runner()

    def emit(event: str, **content: Any) -> None:
        channel.write(json.dumps({"event": event, **content}) + "\n")
        channel.flush()

    started = time.monotonic()
    executed, failure = _execute(job, emit)
    result: dict[str, Any] = {"name": job["name"], "status": "failed" if failure else "ok", "key": job["key"]}
    result |= {"profile": job["profile"], "failure": failure, "notebook": None, "page": None, "reports": []}
    if executed is not None:
        result["reports"] = outputs.reports(executed)
        _write_notebook(job, executed, result)
    result["seconds"] = round(time.monotonic() - started, 1)
    write_json(Path(job["result"]), result)
    emit("done", status=result["status"], seconds=result["seconds"])
    return 0


def _execute(job: dict[str, Any], emit: Any) -> tuple[Any, dict[str, Any] | None]:
    """The executed notebook, as far as it came, and what went wrong (None if nothing did)."""
    from jupyter_client.kernelspec import NoSuchKernel
    from papermill.exceptions import PapermillExecutionError

    from dslib.suite import engine

    try:
        notebook = clear(read_notebook(Path(job["source"])))
    except (NotebookError, OSError) as error:
        return None, failure("notebook", str(error))
    _complete_metadata(notebook)
    figures_expected = draws_figures(notebook)
    emit("start", cells=len(notebook.cells))
    watch = engine.Watch(emit, job["timeout"])
    problem: dict[str, Any] | None = None
    try:
        _papermill(notebook, job, watch)
    except engine.CellExecutionError as error:
        problem = failure("error", f"{error.ename}: {outputs.plain(error.evalue)}")
        problem["traceback"] = _traceback(watch) or outputs.last_frames([error.traceback])
    except PapermillExecutionError:
        # The engine raises what stopped a cell; this one only means that an error is shown
        # somewhere. _inspect tells an unsolved exercise from a swallowed error.
        pass
    except engine.CellTimeoutError:
        problem = failure("timeout", f"the notebook ran past its limit of {job['timeout']:g} s (--timeout)")
    except engine.DeadKernelError:
        problem = failure("dead kernel", "the kernel died; often the memory ran out or native code crashed")
    except engine.NotebookExit as error:
        problem = failure("exit", str(error))
    except engine.KernelStartError as error:
        problem = failure("kernel", str(error))
    except NoSuchKernel as error:
        problem = failure("kernel", _no_kernel(error.name))
    except Exception as error:
        # Whatever else papermill or Jupyter raise: the notebook did not finish.
        problem = failure("runner", f"{type(error).__name__}: {error}")
        problem["traceback"] = outputs.last_frames(traceback.format_exc().splitlines())
    executed = watch.notebook
    if executed is None:
        return None, problem
    _settle(executed, job)
    if problem is not None:
        if watch.cell is not None:
            problem |= {
                "cell": watch.cell + 1,
                "source": outputs.bounded(executed.cells[watch.cell].source, 4000),
            }
        return executed, problem
    return executed, _inspect(executed, figures_expected)


def _papermill(notebook: Any, job: dict[str, Any], watch: Any) -> None:
    import logging

    import papermill

    from dslib.suite import engine

    logging.getLogger("papermill").setLevel(logging.ERROR)
    engine.register()
    papermill.execute_notebook(
        notebook,
        None,
        # Literals travel as source text: JSON would turn tuples into lists.
        parameters={name: _literal(text) for name, text in job["parameters"].items()},
        engine_name=engine.ENGINE,
        progress_bar=False,
        # Always the notebook's own directory, wherever the run was started.
        cwd=str(Path(job["source"]).parent),
        watch=watch,
    )


def _inspect(executed: Any, figures_expected: bool) -> dict[str, Any] | None:
    """Faults that stop no cell: an error caught by a widget or callback, figures that never came."""
    for cell, output in outputs.errors(executed):
        where = "in the output of a widget" if cell is None else "in a cell that went on as if nothing were"
        problem = failure(
            "swallowed error", f"{output['ename']}: {outputs.plain(output['evalue'])} ({where})"
        )
        problem["traceback"] = outputs.last_frames(list(output["traceback"]))
        if cell is not None:
            problem |= {"cell": cell + 1, "source": outputs.bounded(executed.cells[cell].source, 4000)}
        return problem
    if figures_expected and not outputs.has_figure(executed):
        return failure(
            "no figure",
            "the notebook draws with matplotlib, but no output is an image; the backend Agg shows none. "
            'A notebook without figures says so in its metadata: {"dslib": {"figures": false}}',
        )
    return None


def _write_notebook(job: dict[str, Any], executed: Any, result: dict[str, Any]) -> None:
    """The executed notebook and its page, under the finished name or the failed one."""
    out = Path(job["out"])
    ending = "" if result["status"] == "ok" else ".failed"
    target = out / f"{job['name']}{ending}.ipynb"
    page = target.with_suffix(".html")
    write_atomic(target, nbformat.writes(executed) + "\n")
    try:
        from dslib.suite.export import export_html

        export_html(target, page)
        result["page"] = page.name
    except Exception as error:
        page.unlink(missing_ok=True)
        if result["status"] == "ok":
            result["status"] = "failed"
            result["failure"] = failure(
                "page", f"the HTML page was not written: {type(error).__name__}: {error}"
            )
            failed = out / f"{job['name']}.failed.ipynb"
            os.replace(target, failed)
            target = failed
    result["notebook"] = target.name


def failure(kind: str, message: str) -> dict[str, Any]:
    """A failure that no cell is to blame for yet: the record that results and scoreboard read."""
    return {"kind": kind, "message": message, "cell": None, "source": None, "traceback": None}


def _complete_metadata(notebook: Any) -> None:
    # Papermill refuses notebooks that do not name their kernel and language.
    kernel = notebook.metadata.setdefault("kernelspec", {})
    kernel.setdefault("name", "python3")
    kernel.setdefault("display_name", "Python 3")
    kernel.setdefault("language", "python")
    for index, cell in enumerate(notebook.cells):
        cell.setdefault("id", f"cell-{index}")


def _settle(executed: Any, job: dict[str, Any]) -> None:
    """Remove what differs from run to run or claims more than is known, keep what was run."""
    executed.metadata.pop("papermill", None)
    executed.cells = [
        cell for cell in executed.cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])
    ]
    for cell in executed.cells:
        cell.metadata.pop("papermill", None)
        if not cell.metadata.get("tags"):
            cell.metadata.pop("tags", None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.id = "injected-parameters"
    run = {"profile": job["profile"], "parameters": job["parameters"]}
    executed.metadata["dslib"] = {**executed.metadata.get("dslib", {}), "run": run}
    widgets = executed.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {})
    for model in widgets.get("state", {}).values():
        if isinstance(model.get("state", {}).get("outputs"), list):
            model["state"]["outputs"] = outputs.tidy(model["state"]["outputs"])


def _literal(text: str) -> Any:
    return set() if text == "set()" else ast.literal_eval(text)


def _traceback(watch: Any) -> str | None:
    cell = watch.notebook.cells[watch.cell]
    found = [output for output in cell.get("outputs", []) if output["output_type"] == "error"]
    return outputs.last_frames(list(found[-1]["traceback"])) if found else None


def _no_kernel(name: str) -> str:
    from jupyter_client.kernelspec import KernelSpecManager

    there = ", ".join(sorted(KernelSpecManager().find_kernel_specs())) or "none"
    return (
        f"the notebook asks for the kernel {name!r}, which is not installed; installed: {there}. "
        "Set its kernelspec to python3 (`dslib lint --fix` does), or install that kernel"
    )


def _private_channel() -> Any:
    # The kernel inherits descriptor 1. Whatever native code prints there goes to the log, and
    # the runner reads nothing but our events.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _end_on_signals() -> None:
    def end(number: int, frame: Any) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end)


def _end_with_the_runner() -> None:
    def wait() -> None:
        # A plain read: a buffered one would hold a lock that the interpreter wants when it ends.
        while os.read(0, 4096):
            pass
        if run_id := os.environ.get(processes.MARKER):
            processes.kill_marked(processes.MARKER, run_id)
        os._exit(1)

    if not os.isatty(0):
        threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
