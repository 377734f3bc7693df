"""Requests that are answered in one pass: a thread packs those of all clients into rows, and reads them together."""

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxglue.data.questions import make_question
from jaxglue.data.read_rows import UnitText
from jaxglue.data.store import Encoded
from jaxglue.data.tokenizer import require_unicode
from jaxglue.generation.reading import LoadedModel, PartReader, decisions, joined, judged, texts
from jaxglue.objectives.reading import PartOutputs
from jaxglue.serve.lanes import beside
from jaxglue.serve.service import EndedError, FullError, require_short

_ROWS = 4
"""Rows of tokens that are read together; a request beyond is read alone."""


@dataclass(frozen=True)
class Read:
    """What a request's parts give, and its tokens."""

    found: PartOutputs
    tokens: int


@dataclass(eq=False)
class _Job:
    reader: PartReader
    encoded: Encoded
    done: Callable[[Read | Exception], None]


class ReadService:
    """A thread that reads the parts of requests.

    Args:
        readers: by what they are for.
        most: requests in the service at a time.
        alone: read each request by itself, so that its bits depend on nobody else's.
    """

    def __init__(self, readers: dict[str, PartReader], *, most: int, alone: bool = False):
        self.readers, self._most = readers, most
        self._alone = alone
        self.failure: str | None = None
        """Reason for the service's end; None while it runs."""
        self.length = min(reader.limit for reader in readers.values())
        """The most tokens of a text."""
        self._jobs = queue.SimpleQueue[_Job | None]()
        self._left: list[_Job | None] = []
        """The job that did not go with those before it."""
        self._open = 0
        self._thread = threading.Thread(target=self._serve, name="reading", daemon=True)
        self._thread.start()

    async def read(self, kind: str, make: Callable[[PartReader], Sequence[UnitText]]) -> Read:
        """Return what the parts of units give.

        Args:
            kind: of the reader.
            make: returns the units; called in a thread.

        Raises:
            ValueError: units that cannot be read.
            FullError: too many requests wait.
            EndedError: an error has ended the service.
        """
        if self.failure:
            raise EndedError(self.failure)
        if self._open >= self._most:
            raise FullError
        loop, reader = asyncio.get_running_loop(), self.readers[kind]
        result = loop.create_future()

        def done(value: Read | Exception) -> None:
            loop.call_soon_threadsafe(_settle, result, value)

        self._open += 1
        try:
            units = await asyncio.to_thread(make, reader)
            texts = [text for unit in units for text in _texts(unit)]
            for text in texts:
                require_unicode(text)
                if reader.encoder.longest is None and len(text) > reader.limit:
                    await beside(len(text), require_short, reader.model.tokenizer, text, reader.limit)
            encoded = await beside(sum(map(len, texts)), reader.encode, units)
            self._jobs.put(_Job(reader, encoded, done))
            if self.failure:  # since the check above: the thread may not have seen the job
                raise EndedError(self.failure)
            return await result
        finally:
            self._open -= 1

    def close(self) -> None:
        """End the thread, after what is under way."""
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        """Begin to read a batch before the one ahead of it is done, so that the device does not wait for the host."""
        ahead: _Batch | None = None
        jobs: list[_Job] = []
        try:
            while (jobs := self._take(waits=ahead is None)) or ahead is not None:
                begun = _Batch(jobs, jobs[0].reader.begin(joined([job.encoded for job in jobs]))) if jobs else None
                if ahead is not None:
                    ahead.finish()
                ahead = begun
        except Exception as error:  # of the model or the device: nothing more can be answered
            self.failure = f"the service has ended: {error}"
            while not self._jobs.empty():
                self._left.append(self._jobs.get())
            for job in (*(ahead.jobs if ahead else ()), *jobs, *filter(None, self._left)):
                job.done(EndedError(self.failure))
            raise

    def _take(self, *, waits: bool) -> list[_Job]:
        """Return the next job and those behind it of the same reader, as many as fit into the rows read together.

        Args:
            waits: for a job, where there is none; else none are returned, as at the service's end.
        """
        if not self._left and not waits and self._jobs.empty():
            return []
        first = self._left.pop() if self._left else self._jobs.get()
        if first is None:
            self._left.append(None)
            return []
        jobs, rooms = [first], [first.reader.row] * _ROWS
        fits = _fill(rooms, first)
        while fits and not self._alone and not self._jobs.empty():
            job = self._jobs.get()
            if job is None or job.reader is not first.reader or not _fill(rooms, job):
                self._left.append(job)
                break
            jobs.append(job)
        return jobs


@dataclass(eq=False)
class _Batch:
    """Jobs that are read together."""

    jobs: Sequence[_Job]
    wait: Callable[[], PartOutputs]

    def finish(self) -> None:
        """Wait for the device, and give each job its parts."""
        found, first = self.wait(), 0
        for job in self.jobs:
            own = (found.units >= first) & (found.units < first + len(job.encoded.lengths))
            first += len(job.encoded.lengths)
            values = {name: value[own] for name, value in found.values.items()}
            part = PartOutputs(found.units[own], found.parts[own], found.outputs[own], values)
            job.done(Read(part, len(job.encoded.tokens)))


def _texts(unit: UnitText) -> list[str]:
    """Return the texts of a unit's beginning and parts."""
    pieces = [unit.prefix, *(part.pieces for part in unit.parts)]
    return ["".join(piece for piece in each if isinstance(piece, str)) for each in pieces]


def _fill(rooms: list[int], job: _Job) -> bool:
    """Put a job's units into rows, and tell whether all have room."""
    for length in job.encoded.lengths.tolist():
        row = next((index for index, room in enumerate(rooms) if room >= length), None)
        if row is None:
            return False
        rooms[row] -= length
    return True


def _settle(result: "asyncio.Future[Read]", value: Read | Exception) -> None:
    if result.done():  # the client has hung up
        return
    if isinstance(value, Exception):
        result.set_exception(value)
    else:
        result.set_result(value)


def warm_up(reader: PartReader) -> None:
    """Compile the programs of rows of all lengths that requests are packed into, by reading such rows."""
    words = "a " * 200
    unit = {
        "decide": lambda: decisions(reader, [(words, {"a": make_question("noul", "Is it?", None)})])[0],
        "embed": lambda: texts(reader, [words])[0],
        "rerank": lambda: judged(reader, words, ["a"]),
    }[reader.kind]()
    one = reader.encode([unit])
    size, row = len(one.tokens), reader.row
    while row >= size:
        reader.read(joined([one] * (row // size)))
        row //= 2


def make_readers(
    model: LoadedModel, record: Mapping[str, Any], *, most: int, alone: bool = False
) -> ReadService | None:
    """Return the thread that reads a model in the ways that its record names, or that any model of text serves.

    One that was not trained to answer in one pass decides, and judges documents, as it is; None where its tokenizer has
    no tokens for that, and it is for nothing else.
    """
    readers = {}
    for kind in [record["kind"]] if record else ["decide", "rerank"]:
        try:
            readers[kind] = PartReader(model, record or {"kind": kind})
        except ValueError:
            if record:
                raise
    return ReadService(readers, most=most, alone=alone) if readers else None
