"""Many prompts over several processes, answered once each and in order; resumable."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from multiprocessing.connection import Connection, wait
from pathlib import Path

from selfspec.config import JsonObject
from selfspec.heads.files import append_line, one_run, read_lines, read_object, refuse_changes

# Called in every process with its number and the number of processes; returns the function that
# answers prompts by row, in any order.
Maker = Callable[[int, int], Callable[[Mapping[int, str]], Iterable[tuple[int, JsonObject]]]]


def run_job(
    prompts: Sequence[str],
    maker: Maker,
    output: str | Path,
    identity: Mapping[str, object],
    processes: int = 1,
    answered: Callable[[int], None] = lambda count: None,
) -> None:
    """Answer prompts and write the answers as JSON lines, in the prompts' order.

    The rows of a process that dies are given to others, as long as there is progress.

    Args:
        prompts: the prompts.
        maker: makes the function that answers prompts, in every process; must be picklable.
        output: the file of answers; it is created when all are there.
        identity: plain values that identify the job. An interrupted job is resumed only if they are
            the same.
        processes: number of processes.
        answered: called with the number of newly answered rows.

    Raises:
        FileExistsError: `output` exists.
        BlockingIOError: another process answers the same prompts to the same file.
        ValueError: another job was interrupted here, or the prompts cannot be answered.
        OSError: all processes died without an answer.
    """
    output = Path(output).expanduser().absolute()
    if output.exists():
        raise FileExistsError(f"{output} is there already; delete it, or name another output")
    parts = output.with_name(f"{output.name}.parts")
    facts = json.loads(json.dumps({**identity, "prompts": list(prompts)}))
    with one_run(parts):
        _claim(parts, facts)
        known = _answer_all(prompts, maker, parts, processes, answered)
        whole = parts / "whole"
        lines = (json.dumps(known[row], ensure_ascii=False) + "\n" for row in range(len(prompts)))
        whole.write_text("".join(lines), encoding="utf-8")
        whole.replace(output)
    shutil.rmtree(parts)


def _answer_all(
    prompts: Sequence[str],
    maker: Maker,
    parts: Path,
    processes: int,
    answered: Callable[[int], None],
) -> dict[int, JsonObject]:
    """Answer the prompts that have no answer yet; returns the answers of all, by row."""
    known = _journals(parts)
    answered(len(known))
    while missing := [row for row in range(len(prompts)) if row not in known]:
        _work_on({row: prompts[row] for row in missing}, maker, parts, processes, answered)
        before, known = len(known), _journals(parts)
        if len(known) == before:
            raise OSError(
                f"every process died without an answer; what there is stays in {parts}, and the "
                "same command continues from there"
            )
    return known


def _claim(parts: Path, identity: JsonObject) -> None:
    """Begin a job, or resume it."""
    file = parts / "job.json"
    if not file.is_file():
        scratch = parts / "job.tmp"
        scratch.write_text(json.dumps(identity), encoding="utf-8")
        scratch.replace(file)
        return
    remedy = "delete it, or name another output"
    refuse_changes(read_object(file), identity, f"{parts} holds answers of a job", remedy)


def _journals(parts: Path) -> dict[int, JsonObject]:
    """The answers so far, by row; unfinished lines are removed."""
    entries = (read_lines(journal, "row", "answer") for journal in parts.glob("*.jsonl"))
    return {entry["row"]: entry["answer"] for entry in chain.from_iterable(entries)}


def _work_on(
    rows: Mapping[int, str],
    maker: Maker,
    parts: Path,
    processes: int,
    answered: Callable[[int], None],
) -> None:
    """Let processes answer rows, until all have finished or died."""
    count = min(processes, len(rows))
    shares = [dict(list(rows.items())[part::count]) for part in range(count)]
    if count == 1:
        for _ in _answers(maker, 0, 1, shares[0], parts):
            answered(1)
        return
    with _started(maker, shares, parts) as pipes:
        while pipes:
            for pipe in wait(pipes):
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except EOFError:  # finished, or dead
                    pipes.remove(pipe)
                    continue
                if message is not None:
                    raise ValueError(message)
                answered(1)


@contextmanager
def _started(
    maker: Maker, shares: Sequence[Mapping[int, str]], parts: Path
) -> Iterator[list[Connection]]:
    """Start the processes; yields the pipe of each."""
    context = multiprocessing.get_context("spawn")  # a fork would copy locks and GPU contexts
    workers, pipes = [], []
    try:
        for number, share in enumerate(shares):
            pipe, report = context.Pipe(duplex=False)
            given = (maker, number, len(shares), share, parts, report)
            worker = context.Process(target=_work, args=given, daemon=True)
            worker.start()
            report.close()  # so that its end is seen here
            workers.append(worker)
            pipes.append(pipe)
        yield pipes
    finally:
        for worker in workers:
            if pipes:  # left early
                worker.terminate()
            worker.join()


def _work(
    maker: Maker,
    number: int,
    count: int,
    rows: Mapping[int, str],
    parts: Path,
    report: Connection,
) -> None:
    """One process: sends `None` for every answer, and a message if it fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = multiprocessing.parent_process()
    try:
        for _ in _answers(maker, number, count, rows, parts):
            report.send(None)
            if parent is not None and not parent.is_alive():
                return
    except (ValueError, OSError, ImportError) as error:
        report.send(str(error))


def _answers(
    maker: Maker, number: int, count: int, rows: Mapping[int, str], parts: Path
) -> Iterator[int]:
    """Answer rows, each written to this process's own journal as soon as it is there."""
    answers = maker(number, count)
    journal = parts / f"{uuid.uuid4().hex}.jsonl"
    for row, answer in answers(rows):
        append_line(journal, {"row": row, "answer": answer})
        yield row
