"""Control of one engine during a weight update: SGLang's HTTP routes, each call with a deadline.

An update is: pause, begin, any number of rounds, end, flush, version, resume. SGLang refuses tensor updates outside of
begin and end. Without the flush the next request would attend to keys of the old weights.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any

import httpx

from slimrl.config.schema.resync import PauseMode
from slimrl.data.boxes import Box
from slimrl.data.engine import EngineError
from slimrl.data.model_weights import EngineModel, EnginePlace, GroupSpec
from slimrl.data.peer_messages import Placed, Round
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.plugin import kept_tensors, scheduler, version_loader, weight_fingerprints
from slimrl.engines.plugin.peer_receiver import plain_rounds
from slimrl.engines.plugin.shared_rounds import plain_loads
from slimrl.engines.plugin.weight_updates import join_payload, load_payload, map_payload, receive_payload


class EngineMemory(str, Enum):
    """Parts of its device memory that an engine can release, by SGLang's names."""

    weights = "weights"
    kv_cache = "kv_cache"
    cuda_graph = "cuda_graph"
    """Working memory of its CUDA graphs, which a release copies to the host."""


class SglangControl:
    """Implements EngineControl for the engine at `url`."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        key: EngineKey,
        timeout_s: float,
        num_ranks: int = 1,
        nodes: tuple[str, ...] = ("",),
        updates_draft: bool = False,
    ) -> None:
        """
        Args:
            key: of the engine's run.
            timeout_s: deadline of each call.
            num_ranks: tensor-parallel size of the engine.
            nodes: of its processes, by the names that the trainer's ranks use too.
            updates_draft: updates also load weights of its draft model.
        """
        self.name, self.place = name, EnginePlace(name=name, nodes=nodes, num_ranks=num_ranks)
        self._timeout_s, self._updated = timeout_s, "all" if updates_draft else EngineModel.target.value
        self._http = httpx.Client(base_url=url, headers=key.headers, timeout=timeout_s, trust_env=False)

    def pause(self, mode: PauseMode = PauseMode.retract) -> None:
        self._call("pause_generation", mode=mode.value)

    def running_requests(self) -> int:
        """Number of requests that hold KV cache; waiting and retracted requests hold none."""
        return sum(state[scheduler.RUNNING_REQUESTS] for state in self._server_state(self._timeout_s))

    def probe(self, timeout_s: float) -> None:
        """Raises EngineError if the engine's workers, paused or not, do not answer in time."""
        self._server_state(timeout_s)

    def begin_update(self) -> None:
        """Closes an interrupted update first, which SGLang still has open."""
        try:
            self._call("begin_weight_update", selector=self._updated)
        except EngineError as error:
            if "already open" not in str(error):
                raise
            self._call("end_weight_update")
            self._call("begin_weight_update", selector=self._updated)

    def map_memory(
        self,
        segments: Mapping[int, Sequence[str]],
        rounds: Sequence[Mapping[EngineModel, Sequence[Sequence[Placed]]]],
    ) -> None:
        self._update([map_payload(plain_loads(each), segments) for each in rounds])

    def load_round(self, model: EngineModel, number: int, slot: int) -> None:
        self._update([load_payload(model, slot, number)] * self.place.num_ranks, model)

    def kept(self, model: EngineModel) -> list[dict[str, list[Box]]]:
        answer = self._checker(kept_tensors.KEPT, None, model)
        # SGLang puts the draft model's role before its names.
        return kept_tensors.parse_kept({name.rpartition(".")[2]: value for name, value in answer.items()})

    def join_group(
        self, group: GroupSpec, rounds: Sequence[Mapping[EngineModel, Sequence[Round]]], fed: GroupSpec | None
    ) -> None:
        plain = [{model.value: plain_rounds(each) for model, each in of_rank.items()} for of_rank in rounds]
        self._update([join_payload(group, each, fed) for each in plain])

    def receive(self, group: str, model: EngineModel, version: int) -> list[int]:
        answer = self._update([receive_payload(group, model, version)] * self.place.num_ranks, model)
        # With attention data parallelism several schedulers say the same.
        counts: list[int] = json.loads(answer["message"].partition(" | ")[0])
        return counts

    def load_version(self, folder: str, local_dir: str | None) -> None:
        body = version_loader.version_request(folder, local_dir, self._timeout_s)
        self._call("update_weights_from_disk", **body)

    def load_checkpoint(self, folder: str) -> None:
        """Load a Hugging Face checkpoint by SGLang's own route, without checking that it is complete."""
        self._call("update_weights_from_disk", model_path=folder, load_format="auto", flush_cache=False)

    def end_update(self) -> None:
        self._call("end_weight_update")

    def flush_cache(self) -> None:
        self._call("flush_cache")

    def set_version(self, version: int) -> None:
        self._call("update_weight_version", new_version=str(version), abort_all_requests=False)

    def resume(self) -> None:
        self._call("continue_generation")

    def fingerprints(self, names: list[str] | None) -> dict[str, str]:
        return self._checker(weight_fingerprints.ACTION, names, EngineModel.target)

    def draft_fingerprints(self, names: list[str]) -> dict[str, str]:
        # SGLang puts the model's role before its names.
        prints = self._checker(weight_fingerprints.ACTION, names, EngineModel.draft)
        return {name.removeprefix(f"{EngineModel.draft.value}."): value for name, value in prints.items()}

    def version(self) -> int:
        """The weight version that the engine serves."""
        return int(self._request("GET", "model_info", self._timeout_s)["weight_version"])

    def flush_when_idle(self) -> None:
        """Flush the prefix cache once no request is running; an aborted request takes a moment to end.

        Raises:
            EngineError: requests still ran at the deadline, and nothing was flushed.
        """
        self._call(f"flush_cache?timeout={0.9 * self._timeout_s:g}")

    def release_memory(self, parts: Collection[EngineMemory]) -> None:
        """Release device memory and its contents. Aborts all requests; none are served before `resume`."""
        self.pause(PauseMode.abort)
        # SGLang's workers crash if memory is released while a request runs.
        self.flush_when_idle()
        self._call("release_memory_occupation", tags=[part.value for part in parts])

    def resume_memory(self, parts: Collection[EngineMemory]) -> None:
        """Allocate released memory again; its contents are undefined."""
        self._call("resume_memory_occupation", tags=[part.value for part in parts])

    def close(self) -> None:
        """Close the connections. Later calls raise EngineError."""
        self._http.close()

    def _server_state(self, timeout_s: float) -> list[dict[str, Any]]:
        """The state of each of the engine's schedulers."""
        return self._request("GET", "server_info", timeout_s)["internal_states"]

    def _checker(self, action: str, names: list[str] | None, model: EngineModel) -> dict[str, str]:
        answer = self._call("weights_checker", action=action, skip_tensor_list=names, selector=model.value)
        return answer["ranks"][0]["checksums"]

    def _update(self, payloads: list[str], model: EngineModel = EngineModel.target) -> dict[str, Any]:
        """
        Args:
            payloads: of each of the engine's ranks.
        """
        return self._call(
            "update_weights_from_tensor",
            serialized_named_tensors=payloads,
            load_format="flattened_bucket",
            flush_cache=False,
            selector=model.value,
        )

    def _call(self, route: str, **body: Any) -> dict[str, Any]:
        return self._request("POST", route, self._timeout_s, body)

    def _request(self, method: str, route: str, timeout_s: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer's JSON object; {} if the route answers with text."""
        if self._http.is_closed:
            raise EngineError(f"{self.name}, {route}: its control was closed")
        try:
            response = self._http.request(method, route, json=body, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise EngineError(f"{self.name}, {route}: no answer within {timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise EngineError(f"{self.name}, {route}: {type(error).__name__} {error}".rstrip()) from error
        is_json = response.headers.get("content-type", "").startswith("application/json")
        answer = response.json() if is_json else {}
        failed = isinstance(answer, dict) and answer.get("success") is False
        if response.status_code != 200 or failed:
            reason = answer.get("message") if isinstance(answer, dict) else None
            raise EngineError(f"{self.name}, {route}: {response.status_code} {reason or response.text[:500]}")
        return answer if isinstance(answer, dict) else {}
