"""Control of one engine while its weights change: SGLang's HTTP routes, each call with its own deadline.

An update is: pause, begin, any number of buckets, end, flush, version, resume. Tensor updates outside of begin and
end are refused by SGLang; without the flush the next request would attend to keys of the old weights.
"""

from typing import Any

import httpx

from slimrl.data.protocols import BucketSpec, EngineError
from slimrl.rollout import weight_fingerprints
from slimrl.rollout.bucket_loader import bucket_name, bucket_payload


class SglangControl:
    """Implements EngineControl for the engine at `url`."""

    def __init__(self, name: str, url: str, *, timeout_s: float, num_ranks: int = 1) -> None:
        """
        Args:
            timeout_s: deadline of each call.
            num_ranks: tensor-parallel size of the engine.
        """
        self._name = name
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    @property
    def name(self) -> str:
        return self._name

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    def pause(self) -> None:
        self._call("pause_generation", mode="retract")

    def begin_update(self) -> None:
        self._call("begin_weight_update")

    def load_shared_bucket(self, segment: str, bucket: BucketSpec) -> None:
        self._call(
            "update_weights_from_tensor",
            serialized_named_tensors=[bucket_payload(segment, bucket)],
            load_format="flattened_bucket",
            flush_cache=False,
        )

    def join_group(self, address: str, port: int, rank: int, world_size: int, group: str, backend: str) -> None:
        self._call(
            "init_weights_update_group",
            master_address=address,
            master_port=port,
            rank_offset=rank,
            world_size=world_size,
            group_name=group,
            backend=backend,
        )

    def leave_group(self, group: str) -> None:
        self._call("destroy_weights_update_group", group_name=group)

    def receive_bucket(self, group: str, bucket: BucketSpec) -> None:
        # One flat tensor of bytes; the engine's hook takes it apart by the description in its name.
        self._call(
            "update_weights_from_distributed",
            names=[bucket_name(bucket)],
            dtypes=["uint8"],
            shapes=[[bucket.nbytes]],
            group_name=group,
            flush_cache=False,
        )

    def end_update(self) -> None:
        self._call("end_weight_update")

    def flush_cache(self) -> None:
        self._call("flush_cache")

    def set_version(self, version: int) -> None:
        self._call("update_weight_version", new_version=str(version), abort_all_requests=False)

    def resume(self) -> None:
        self._call("continue_generation")

    def fingerprints(self, names: list[str] | None) -> dict[str, str]:
        answer = self._call(
            "weights_checker", action=weight_fingerprints.ACTION, skip_tensor_list=names, selector="target"
        )
        return answer["ranks"][0]["checksums"]

    def version(self) -> int:
        """The version that the engine says it serves."""
        try:
            response = self._http.get("model_info")
            return int(response.raise_for_status().json()["weight_version"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise EngineError(f"{self._name}, model_info: {error!r}") from error

    def close(self) -> None:
        self._http.close()

    def _call(self, route: str, **body: Any) -> dict[str, Any]:
        """POST; the JSON of the answer, or {} where the route answers in prose."""
        try:
            response = self._http.post(route, json=body)
        except httpx.TimeoutException as error:
            raise EngineError(f"{self._name}, {route}: no answer within {self._timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise EngineError(f"{self._name}, {route}: {type(error).__name__} {error}".rstrip()) from error
        is_json = response.headers.get("content-type", "").startswith("application/json")
        answer = response.json() if is_json else {}
        failed = isinstance(answer, dict) and answer.get("success") is False
        if response.status_code != 200 or failed:
            reason = answer.get("message") if isinstance(answer, dict) else None
            raise EngineError(f"{self._name}, {route}: {response.status_code} {reason or response.text[:500]}")
        return answer if isinstance(answer, dict) else {}
