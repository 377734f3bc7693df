"""The HTTP interface of the `tinker` SDK to sessions of this library, for this machine alone.

    from jaxglue.tinker.server import TinkerServer

    server = TinkerServer(model="Qwen3-8B")  # its token is server.api_key
    server.run(port=8001)

and in the loop `tinker.ServiceClient(base_url="http://127.0.0.1:8001", api_key=…)`. A request is answered with the name
of its result, which the SDK asks for; one thread computes results in the order of the requests, but that requests for
answers are answered together, by whichever saved weights, and documents of several requests for losses share rows.
"""

import asyncio
import hmac
import math
import re
import secrets
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxglue.api.documents import TokenDocument
from jaxglue.api.session import Session
from jaxglue.data.images import ImageRules
from jaxglue.files.json_file import parse_json
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Completion
from jaxglue.generation.scheduler import Request
from jaxglue.models.parameters import Params
from jaxglue.serve.local import foreign_page
from jaxglue.terminal.lines import echo
from jaxglue.tinker.adapters import Adapter, gradients_of_each, side_by_side
from jaxglue.tinker.images import Chunks, read_chunk, with_places
from jaxglue.tinker.losses import TokenLoss, find_loss, read_document
from jaxglue.tinker.wire import LossRequest, loss_response, read_loss_request, sample_response
from jaxglue.training.optimizer_objects import SteppedAdam

_LARGEST_BODY = 64 * 2**20
_WAIT = 20.0
"""Seconds after which a client asks for a result again."""
_KEPT_RESULTS = 1024
_KEPT_SAMPLERS = 16
"""Saved weights that can be sampled from: each is a copy of an adapter on the GPU."""
_TOGETHER = 4
"""Adapters that answer, or train, in the same rows: programs are compiled for their ranks."""
_LOOKED_AT = 64
"""Requests for losses that wait, of which those that fit are computed together."""
_MOST_SAMPLES = 1024
_MOST_LIKELY = 100
_LARGEST_RANK = 4096
_PROTOBUF = "application/x-protobuf"
_NAME = re.compile(r"[\w.:-]{1,100}")
_CLIENT = {"use_pyqwest_transport": False, "parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False}
"""Settings of the SDK's client."""


class RefusedError(Exception):
    """A request that is refused, with HTTP's status."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class _Model(NamedTuple):
    session: Session
    optimizer: SteppedAdam
    rank: int
    unembed: bool
    """The output projection is adapted; where the base ties it to the embedding, the model has it apart."""


class _Sampler(NamedTuple):
    model: _Model
    adapter: Adapter


@dataclass(frozen=True, eq=False)
class _Losses:
    """A request for losses that waits."""

    request: LossRequest
    after: int
    """Operations of its model that come before."""
    rules: Callable[[], ImageRules | None]
    """Returns the rules of the models' images, once there is a model."""
    result: Future[bytes] = field(default_factory=Future)

    @cached_property
    def loss(self) -> TokenLoss:
        """Return the loss; raise ValueError for one that there is not."""
        return find_loss(self.request.loss, self.request.config)

    @cached_property
    def documents(self) -> list[TokenDocument]:
        """Return the documents; raise ValueError for arrays that the loss does not read."""
        return [read_document(datum, self.rules(), self.loss.columns) for datum in self.request.data]


class TinkerServer:
    """Models in training for the `tinker` SDK: sessions on the weights of one base.

    Args:
        api_key: that requests must bring; drawn if none is given. The SDK wants it to begin with `tml-`.
        models: most models in training at a time.
        settings: of every session: `model`, `quantize`, `seq_len`, …; `images=True` reads images.
    """

    def __init__(self, *, api_key: str | None = None, models: int = 8, **settings: Any):
        self.api_key = api_key or f"tml-{secrets.token_hex(16)}"
        self._settings, self._most = settings, models
        self._models: dict[str, _Model] = {}
        self._samplers: dict[str, _Sampler] = {}
        self._saved: dict[Path, tuple[int, bool]] = {}
        """Ranks of saved weights, and whether the output projection is among them, by their folders."""
        self._results: dict[str, Future] = {}
        self._waiting: list[_Losses] = []
        self._begun, self._done = Counter[str](), Counter[str]()
        """Operations of each model that were asked for, and those that are over."""
        self._asked: list[tuple[str, Mapping[str, Any], Future[bytes]]] = []
        """Requests for answers that wait, with the names of their weights."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="jaxglue-tinker")
        self._folder = tempfile.TemporaryDirectory(prefix="jaxglue-tinker-")
        posts: dict[str, Callable] = {
            "client/config": lambda body: _CLIENT,
            "client/dynamic_config": lambda body: {},
            "telemetry": lambda body: {"status": "accepted"},
            "create_session": lambda body: {"type": "create_session", "session_id": f"session-{uuid.uuid4()}"},
            "session_heartbeat": lambda body: {"type": "session_heartbeat"},
            "create_sampling_session": self._create_sampling_session,
            "get_info": self._get_info,
        }
        later: dict[str, Callable] = {
            "create_model": self._create_model,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "unload_model": self._unload_model,
        }
        capability = {"model_name": str(settings.get("model", settings.get("recipe"))), "trainable": True}
        routes = [
            Route("/api/v1/healthz", self._guarded(lambda http: _now({"status": "ok"}))),
            Route(
                "/api/v1/get_server_capabilities",
                self._guarded(lambda http: _now({"supported_models": [capability | {"sampleable": True}]})),
            ),
            Route("/api/v1/forward_backward", self._guarded(self._losses), methods=["POST"]),
            Route("/api/v1/asample", self._guarded(self._answers), methods=["POST"]),
            Route("/api/v1/retrieve_future", self._guarded(self._retrieve), methods=["POST"]),
            Route("/api/v1/sessions/{session}/finish", self._guarded(self._finish), methods=["POST"]),
        ]
        routes += [
            Route(f"/api/v1/{name}", self._guarded(_answering(do)), methods=["POST"]) for name, do in posts.items()
        ]
        routes += [
            Route(f"/api/v1/{name}", self._guarded(self._promising(do)), methods=["POST"]) for name, do in later.items()
        ]
        self.app = Starlette(routes=routes)

    def run(self, *, port: int = 8001) -> None:
        """Answer requests on this machine until Ctrl-C."""
        import uvicorn

        echo(f"serving tinker's interface at http://127.0.0.1:{port}; TINKER_API_KEY={self.api_key}", error=True)
        try:
            uvicorn.run(self.app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=5)
        finally:
            self.close()

    def close(self) -> None:
        """Free the models."""
        self._worker.shutdown(cancel_futures=True)
        for model in self._models.values():
            model.session.close()
        self._folder.cleanup()

    def _guarded(self, handler: Callable) -> Callable:
        """Return the handler behind the token, with errors as the SDK reads them."""

        async def run(http: HttpRequest) -> Response:
            if reason := foreign_page(http.headers):
                return JSONResponse({"error": reason}, 403)
            sent = http.headers.get("x-api-key", "").encode("latin-1")
            if not hmac.compare_digest(sent, self.api_key.encode()):
                return JSONResponse({"error": "no or a wrong API key"}, 401)
            try:
                return await handler(http)
            except RefusedError as error:
                return JSONResponse({"error": str(error)}, error.status)
            except (ValueError, KeyError, TypeError) as error:
                return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 400)

        return run

    def _promising(self, do: Callable) -> Callable:
        async def run(http: HttpRequest) -> Response:
            return self._promise(do, await _read_json(http))

        return run

    def _promise(self, do: Callable, body: Mapping[str, Any]) -> Response:
        """Begin an operation after those before it; return the name of its result."""
        model = str(body.get("model_id"))
        self._begun[model] += 1

        def run() -> Any:
            try:
                return do(body)
            finally:
                self._done[model] += 1

        return JSONResponse({"request_id": self._keep(self._worker.submit(run))})

    def _keep(self, result: Future) -> str:
        """Keep a result to come until it is asked for; return its name."""
        name = f"request-{uuid.uuid4()}"
        self._results[name] = result
        while len(self._results) > _KEPT_RESULTS and next(iter(self._results.values())).done():
            del self._results[next(iter(self._results))]
        return name

    async def _losses(self, http: HttpRequest) -> Response:
        """Let a request for losses wait for the thread, which may compute it with others before."""
        request = read_loss_request(await _read(http))
        asked = _Losses(request, self._begun[request.model_id], self._image_rules)
        self._waiting.append(asked)
        self._worker.submit(self._compute_losses, asked)
        return JSONResponse({"request_id": self._keep(asked.result)})

    def _image_rules(self) -> ImageRules | None:
        return next((model.session.image_rules for model in self._models.values()), None)

    async def _answers(self, http: HttpRequest) -> Response:
        """Let a request for answers wait for the thread, which takes all that wait at once."""
        body = await _read_json(http)
        samples = body.get("num_samples", 1)
        if type(samples) is not int or not 1 <= samples <= _MOST_SAMPLES:
            raise ValueError(f"num_samples: expected 1 to {_MOST_SAMPLES}, got {samples!r:.100}")
        result, sampler = Future[bytes](), str(body.get("sampling_session_id") or body.get("model_path"))
        self._asked.append((sampler, body, result))
        self._worker.submit(self._answer_all)
        name = self._keep(result)
        ids = [f"{name}:{i}" for i in range(samples)]
        return JSONResponse({"request_id": name} | ({"sample_sequence_ids": ids} if "num_samples" in body else {}))

    async def _retrieve(self, http: HttpRequest) -> Response:
        name = (await _read_json(http)).get("request_id", "")
        future = self._results.get(name)
        if future is None:
            raise RefusedError("no such request, or its result is too old", 404)
        waiting = asyncio.wrap_future(future)
        done, _ = await asyncio.wait([waiting], timeout=_WAIT)
        if not done:
            return JSONResponse({"type": "try_again", "request_id": name, "queue_state": "active"})
        if (error := waiting.exception()) is not None:
            category = "user" if isinstance(error, ValueError | KeyError | RefusedError) else "server"
            return JSONResponse({"error": str(error), "category": category})
        result = future.result()
        return Response(result, media_type=_PROTOBUF) if isinstance(result, bytes) else JSONResponse(result)

    async def _finish(self, http: HttpRequest) -> Response:
        """Free the models of a client's session, after what it asked for; what it saved stays."""
        prefix = f"{http.path_params['session']}:"
        self._worker.submit(self._unload_all, prefix)
        return JSONResponse({})

    def _model(self, body: Mapping[str, Any]) -> _Model:
        if (model := self._models.get(str(body.get("model_id")))) is None:
            raise RefusedError(f"no model {body.get('model_id')!r:.100}")
        return model

    def _create_model(self, body: Mapping[str, Any]) -> dict[str, Any]:
        lora = _object(body, "lora_config") or {"rank": 32}
        if not (_flag(lora, "train_attn", True) and _flag(lora, "train_mlp", True)):
            raise ValueError("lora_config: attention and feed-forwards are adapted together")
        unembed = _flag(lora, "train_unembed", True)
        if (rank := _whole(lora, "rank", 32)) > _LARGEST_RANK:
            raise ValueError(f"lora_config.rank: expected at most {_LARGEST_RANK:,}, got {rank:,}")
        return {"type": "create_model", "model_id": self._add_model(body, rank, unembed)}

    def _add_model(self, body: Mapping[str, Any], rank: int, unembed: bool) -> str:
        """Add a model by the number that its session gives it; return its name."""
        absent = body.get("model_seq_id") is None
        number = uuid.uuid4().hex if absent else _whole(body, "model_seq_id", 0, least=0)
        name = f"{_name(body.get('session_id'))}:train:{number}"
        if name in self._models:
            raise ValueError(f"model_seq_id: {name} is in training")
        if len(self._models) >= self._most:
            raise ValueError(f"{self._most} models are in training: unload one, or serve with models=…")
        self._check_base(body.get("base_model"))
        targets = "all-linear", *(["lm_head"] if unembed else [])
        adapter, optimizer = {"rank": rank, "alpha": 32.0, "targets": targets}, SteppedAdam()
        base = next((model.session for model in self._models.values() if model.unembed == unembed), None)
        session = Session(optimizer=optimizer, base=base, **{**adapter, **self._settings})
        self._models[name] = _Model(session, optimizer, rank, unembed)
        return name

    def _check_base(self, asked: Any) -> None:
        """Refuse a model of another name than that served, whose folder may stand elsewhere or on the hub.

        A request that names none means this one.
        """
        served = str(self._settings.get("model", self._settings.get("recipe")))
        if asked is None:
            return
        if not isinstance(asked, str) or Path(asked).name.lower() != Path(served).name.lower():
            raise ValueError(f"base_model: this server trains {served}, got {asked!r:.100}")

    def _unload_model(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self._model(body)
        self._unload(body["model_id"])
        return {"type": "unload_model", "model_id": body["model_id"]}

    def _unload_all(self, prefix: str) -> None:
        for name in [name for name in self._models if name.startswith(prefix)]:
            self._unload(name)

    def _unload(self, name: str) -> None:
        model = self._models.pop(name)
        model.session.close()
        self._samplers = {name: sampler for name, sampler in self._samplers.items() if sampler.model is not model}

    def _get_info(self, body: Mapping[str, Any]) -> dict[str, Any]:
        model = self._model(body)
        name = str(self._settings.get("model", self._settings.get("recipe")))
        data = {"arch": model.session.architecture, "model_name": name, "tokenizer_id": name}
        return {
            "type": "get_info",
            "model_id": body["model_id"],
            "model_name": name,
            "model_data": data,
            "is_lora": True,
            "lora_rank": model.rank,
        }

    def _compute_losses(self, first: _Losses) -> None:
        """Compute a request's losses and gradients unless they are, with those of others that fill up its rows."""
        if first not in self._waiting:
            return
        self._waiting.remove(first)
        with _failing([first.result]):
            group = [first, *self._beside(first)]
        if first.result.done():
            return
        for asked in group[1:]:
            self._waiting.remove(asked)
        with _failing([asked.result for asked in group]):
            self._compute_together(group)

    def _beside(self, first: _Losses) -> list[_Losses]:
        """Return further requests whose turn may come now, and whose documents take less time in common rows."""
        model, loss = self._model({"model_id": first.request.model_id}), first.loss
        model.session.check_documents(first.documents)
        found, models, documents = list[_Losses](), {first.request.model_id: model}, first.documents
        for asked in self._waiting[:_LOOKED_AT]:
            name = asked.request.model_id
            other = self._models.get(name)
            if (
                other is None
                or self._done[name] < asked.after
                or asked.request.forward_only != first.request.forward_only
            ):
                continue
            if name not in models and (len(models) == _TOGETHER or not _go_together(model, other)):
                continue
            try:
                other.session.check_documents(asked.documents)
            except ValueError:
                continue  # which is said in its turn
            if asked.loss is loss and model.session.shares_rows([documents, asked.documents]):
                found.append(asked)
                models[name], documents = other, [*documents, *asked.documents]
        return found

    def _compute_together(self, group: Sequence[_Losses]) -> None:
        """Compute losses and gradients of requests in common rows."""
        models = {asked.request.model_id: self._model({"model_id": asked.request.model_id}) for asked in group}
        (session, *others), loss = [model.session for model in models.values()], group[0].loss
        backward, weights, ranks = not group[0].request.forward_only, None, dict[str, np.ndarray | None]()
        adapters = [_adapter(model.session) for model in models.values()] if others else []
        if others:  # the oldest model on the base computes, whose programs are compiled once
            session = next(model.session for model in self._models.values() if model.session.frozen is session.frozen)
            weights, masks = side_by_side(adapters, session.lora)
            ranks = dict(zip(models, masks, strict=True))
        documents = [
            document._replace(ranks=ranks.get(asked.request.model_id))
            for asked in group
            for document in asked.documents
        ]
        found = session.token_losses(documents, loss.function, weights=weights, backward=backward, derive=loss.derive)
        if (gradients := found.gradients) is not None:
            parts = gradients_of_each(gradients, adapters, _adapter(session).config) if others else [gradients]
            for model, part in zip(models.values(), parts, strict=True):
                model.session.add_gradients(part)
        values = zip(found.losses, found.log_probs, strict=True)
        for asked in group:
            own = [next(values) for _ in asked.documents]
            total = sum(loss for loss, _ in own)
            asked.result.set_result(loss_response([log_probs for _, log_probs in own], {"loss:sum": total}))

    def _optim_step(self, body: Mapping[str, Any]) -> dict[str, Any]:
        model, given = self._model(body), _object(body, "adam_params")
        if body.get("adam_params") is None:
            raise ValueError("optim_step: AdamW alone is served: give adam_params")
        known = model.optimizer.settings.keys()
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"optim_step: unknown {', '.join(unknown)}: expected {', '.join(known)}")
        model.optimizer.settings.update({name: _adam_number(name, value) for name, value in given.items()})
        return {"metrics": model.session.optim_step()}

    def _save_weights(self, body: Mapping[str, Any]) -> dict[str, Any]:
        model, name = self._model(body), _name(body.get("path"))
        folder = self._path(body["model_id"], name)
        model.session.save(folder)
        self._saved[folder] = model.rank, model.unembed
        return {"type": "save_weights", "path": f"tinker://{body['model_id']}/weights/{name}"}

    def _load_weights(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Load saved weights into a model, or into a new one of a session's."""
        optimizer = _flag(body, "optimizer", True)
        found = re.fullmatch(r"tinker://([^/]+)/weights/([^/]+)", str(body.get("path")))
        folder = None if found is None else self._path(_name(found[1]), _name(found[2]))
        if folder not in self._saved:
            raise ValueError(f"no weights at {body.get('path')!r:.200}")
        model = body.get("model_id") if body.get("session_id") is None else self._add_model(body, *self._saved[folder])
        self._model({"model_id": model}).session.load(folder, optimizer=optimizer)
        return {"type": "load_weights", "path": body["path"], "model_id": model}

    def _save_for_sampler(self, body: Mapping[str, Any]) -> dict[str, Any]:
        model, given = self._model(body), body.get("path")
        name = f"tinker://{body['model_id']}/sampler_weights/{_name(given)}"
        self._samplers.pop(name, None)
        while len(self._samplers) >= _KEPT_SAMPLERS:
            del self._samplers[next(iter(self._samplers))]
        adapter = _adapter(model.session)._replace(weights=model.session.snapshot())
        self._samplers[name] = _Sampler(model, adapter)
        return {"type": "save_weights_for_sampler", **({"path": name} if given else {"sampling_session_id": name})}

    def _path(self, model: str, name: str) -> Path:
        return Path(self._folder.name) / model / name

    def _create_sampling_session(self, body: Mapping[str, Any]) -> dict[str, Any]:
        name = body.get("model_path")
        if name not in self._samplers:
            raise ValueError(
                f"create_sampling_session: expected the model_path of the last {_KEPT_SAMPLERS} saved weights"
            )
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _answer_all(self) -> None:
        """Answer the requests that wait for answers."""
        asked = dict[str, list[tuple[_Question, Future[bytes]]]]()
        while self._asked:
            name, body, result = self._asked.pop(0)
            if result.set_running_or_notify_cancel():
                with _failing([result]):
                    asked.setdefault(name, []).append((self._read_question(name, body), result))
        for names in self._rounds(asked):
            pairs = [pair for name in names for pair in asked[name]]
            with _failing([result for _, result in pairs]):
                weights, ranks = self._weights(names)
                requests = [
                    replace(question.request, ranks=own)
                    for name, own in zip(names, ranks, strict=True)
                    for question, _ in asked[name]
                ]
                found = list[list[Completion]]([] for _ in pairs)
                for done in self._samplers[names[0]].model.session.sample_tokens(requests, (), weights):
                    found[done.number].append(done)
                for (question, result), answers in zip(pairs, found, strict=True):
                    answers.sort(key=lambda each: each.answer)
                    with _failing([result]):
                        result.set_result(question.response(answers))

    def _rounds(self, names: Iterable[str]) -> list[list[str]]:
        """Divide saved weights into those whose answers are written together: a few adapters on the same base."""
        rounds: dict[Any, list[list[str]]] = {}
        for name in names:
            sampler = self._samplers[name]
            alone = not sampler.adapter.is_plain
            of_base = rounds.setdefault(name if alone else id(sampler.model.session.frozen), [[]])
            if len(of_base[-1]) == _TOGETHER:
                of_base.append([])
            of_base[-1].append(name)
        return [names for of_base in rounds.values() for names in of_base]

    def _weights(self, names: Sequence[str]) -> tuple[Params, Sequence[np.ndarray | None]]:
        """Return the parameters of saved weights together, and the ranks of each."""
        adapters = [self._samplers[name].adapter for name in names]
        return (adapters[0].weights, [None]) if len(adapters) == 1 else side_by_side(adapters)

    def _read_question(self, name: str, body: Mapping[str, Any]) -> "_Question":
        sampler = self._samplers.get(name)
        if sampler is None:
            raise ValueError(f"asample: expected a sampling session of the last {_KEPT_SAMPLERS} saved weights")
        given, session = dict(_object(body, "sampling_params")), sampler.model.session
        if unread := [name for name in ("topk_sample_logprobs", "target_prompt_logprobs") if body.get(name)]:
            raise ValueError(f"asample: {', '.join(unread)} are not computed: use a forward pass")
        seed, longest = given.get("seed"), given.get("max_tokens")
        config = SamplingConfig(
            max_tokens=512 if longest is None else longest,
            temperature=given.get("temperature", 1.0),
            top_p=given.get("top_p", 1.0),
            top_k=max(_whole(given, "top_k", -1, least=-1), 0),
            seed=secrets.randbits(31) if seed is None else _whole(given, "seed", 0, least=0),
        )
        top = _whole(body, "topk_prompt_logprobs", 0, least=0)
        if top > _MOST_LIKELY:
            raise ValueError(f"topk_prompt_logprobs: expected at most {_MOST_LIKELY}, got {top}")
        stops = session.stops if given.get("stop") is None else _stops(session, given["stop"])
        tokens, images = with_places(_prompt(body), session.image_rules)
        (read, seen), count = session.see(tokens, images), _whole(body, "num_samples", 1)
        request = Request(read, config, n=count, stop=frozenset(stops), images=seen)
        session.check_request(request)
        scored = _flag(body, "prompt_logprobs", False) or top > 0
        if scored and images:
            raise ValueError("prompt_logprobs: they are not computed of prompts with images: use a forward pass")
        last = _whole(body, "prompt_logprobs_last_n", len(request.prompt))
        return _Question(sampler, request, top, last if scored else None)


class _Question(NamedTuple):
    """A request for answers."""

    sampler: _Sampler
    request: Request
    top: int
    """Likely tokens of the prompt's places that are asked for."""
    last: int | None
    """Last tokens of the prompt whose log-probabilities are asked for; None for none."""

    def response(self, answers: Sequence[Completion]) -> bytes:
        """Return the message with the answers, and the prompt's log-probabilities where these are asked for."""
        found = [(each.tokens, each.log_probs, each.finish == "stop") for each in answers]
        if self.last is None:
            return sample_response(found)
        prompt = [*self.request.prompt]
        return sample_response(found, *_prompt_scores(self.sampler, prompt, self.top, self.last))


@contextmanager
def _failing(results: Sequence[Future]) -> Iterator[None]:
    """Let an error in the body be that of the results that have none yet."""
    try:
        yield
    except Exception as error:
        for result in results:
            if not result.done():
                result.set_exception(error)


def _prompt_scores(
    sampler: _Sampler, prompt: Sequence[int], top: int, last: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
    """Return log-probabilities of a prompt's last tokens, and the likeliest in their places; the first has none."""
    scores = sampler.model.session.score_tokens(prompt, top, sampler.adapter.weights)
    log_probs, ids = np.full(len(prompt), np.nan, np.float32), np.zeros((len(prompt), top), np.int32)
    likely = np.full((len(prompt), top), np.nan, np.float32)
    shown = range(max(1, len(prompt) - last), len(prompt))
    for place in shown:
        log_probs[place] = scores.log_probs[place - 1]
        ids[place], likely[place] = scores.likely_ids[place - 1], scores.likely_log_probs[place - 1]
    return log_probs, (ids, likely) if top else None


def _adapter(session: Session) -> Adapter:
    """Return the adapter that a session trains."""
    assert session.lora is not None
    return Adapter(session.trained, session.lora)


def _go_together(model: _Model, other: _Model) -> bool:
    """Return whether two models' documents may share rows: their adapters are plain, and on the same base."""
    sessions = model.session, other.session
    return sessions[0].frozen is sessions[1].frozen and all(_adapter(session).is_plain for session in sessions)


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of a request, empty where there is none."""
    value = body.get(name)
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{name}: expected an object, got {value!r:.100}")
    return value or {}


def _whole(body: Mapping[str, Any], name: str, absent: int, least: int = 1) -> int:
    """Return a whole number of a request, `absent` where there is none."""
    value = absent if body.get(name) is None else body[name]
    if type(value) is not int or value < least:
        raise ValueError(f"{name}: expected a whole number from {least}, got {value!r:.100}")
    return value


def _flag(body: Mapping[str, Any], name: str, absent: bool) -> bool:
    """Return a truth value of a request, `absent` where there is none."""
    value = absent if body.get(name) is None else body[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {value!r:.100}")
    return value


def _adam_number(name: str, value: Any) -> float:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 <= number < (1 if name.startswith("beta") else math.inf):
        wanted = "a number from 0 to below 1" if name.startswith("beta") else "a number from 0"
        raise ValueError(f"adam_params: {name}: expected {wanted}, got {value!r:.100}")
    return number


def _prompt(body: Mapping[str, Any]) -> Chunks:
    chunks = _object(body, "prompt").get("chunks") or []
    return [read_chunk(chunk) for chunk in (chunks if isinstance(chunks, list) else [chunks])]


def _stops(session: Session, given: Any) -> set[int]:
    """Return the stop tokens of a request: ids, or texts of one token each."""
    listed = given if isinstance(given, list) else [given]
    found: set[int] = set()
    for each in listed:
        if not isinstance(each, str) and type(each) is not int:
            raise ValueError(f"stop: expected ids, or texts of one token, got {each!r:.50}")
        ids = [each] if isinstance(each, int) else session.tokenizer.encode(each, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"stop: {each!r:.50} is {len(ids)} tokens: give ids, or texts of one token")
        found.add(ids[0])
    return found


def _name(given: Any) -> str:
    name = uuid.uuid4().hex if given is None else given
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith("."):
        raise ValueError(f"path: expected letters, digits, dots and dashes, got {name!r:.100}")
    return name


def _answering(do: Callable) -> Callable:
    async def run(http: HttpRequest) -> Response:
        return JSONResponse(do(await _read_json(http)))

    return run


async def _now(value: Any) -> Response:
    return JSONResponse(value)


async def _read(http: HttpRequest) -> bytes:
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > _LARGEST_BODY:
            raise RefusedError(f"the request is larger than {_LARGEST_BODY >> 20} MiB", 413)
    return bytes(body)


async def _read_json(http: HttpRequest) -> dict[str, Any]:
    body = await _read(http)
    value = parse_json(body.decode(), "the request") if body else {}
    if not isinstance(value, dict):
        raise RefusedError("the request is no JSON object")
    return value
