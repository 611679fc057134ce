"""What a run does now, for Prometheus, beside the metrics of its steps (docs/observing.md#prometheus)."""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from slimrl.agent.gateway.activity import ACTIVITY, BOUNDS_S, GatewayActivity
from slimrl.rollout.service import RolloutService
from slimrl.rollout.stage import RolloutStage


class LiveMetrics:
    """See observability.prometheus_tracker.Live."""

    def __init__(
        self,
        run: str,
        service: RolloutService,
        stage: RolloutStage,
        engine_urls: Callable[[], Mapping[str, str]],
        gateway: GatewayActivity = ACTIVITY,
    ) -> None:
        """
        Args:
            engine_urls: addresses of the engines, by name.
        """
        self._run, self._service, self._stage, self._gateway = run, service, stage, gateway
        self.engine_urls = engine_urls

    def collect(self) -> Iterator[Metric]:
        """All families of metrics; those of the gateway where agents ask it."""
        counts, groups = self._stage.counts, self._service.admission.counts
        yield self._gauge("slimrl_rollout_running_groups", "Groups that run", groups["running"])
        yield self._gauge(
            "slimrl_rollout_waiting_groups", "Groups that have ended and wait for the trainer", groups["waiting"]
        )
        yield self._gauge(
            "slimrl_rollout_batch_trajectories",
            "Trajectories of groups that have ended since the trainer took groups",
            self._service.num_ended,
        )
        running = GaugeMetricFamily(
            "slimrl_rollout_running_trajectories", "Trajectories that run", labels=["run", "kind"]
        )
        tokens = CounterMetricFamily(
            "slimrl_rollout_tokens", "Sampled tokens of ended trajectories", labels=["run", "kind"]
        )
        for kind in ("train", "eval"):
            running.add_metric([self._run, kind], counts.running[kind])
            tokens.add_metric([self._run, kind], counts.tokens[kind])
        ended = CounterMetricFamily(
            "slimrl_rollout_trajectories", "Trajectories that have ended", labels=["run", "kind", "status"]
        )
        for (kind, status), number in list(counts.ended.items()):
            ended.add_metric([self._run, kind, status], number)
        yield from (running, tokens, ended)
        if self._gateway.sessions:
            yield from self._of_gateway()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["run"])
        family.add_metric([self._run], value)
        return family

    def _of_gateway(self) -> Iterator[Metric]:
        labels = ["run"]
        opened = GaugeMetricFamily("slimrl_gateway_open_sessions", "Trajectories whose agents may ask", labels=labels)
        opened.add_metric([self._run], self._gateway.open_sessions)
        requests = CounterMetricFamily(
            "slimrl_gateway_requests", "Requests of the policy by what became of them", labels=[*labels, "outcome"]
        )
        for outcome, number in self._gateway.requests.items():
            requests.add_metric([self._run, outcome], number)
        seconds = HistogramMetricFamily("slimrl_gateway_request_seconds", "Time of an answered request", labels=labels)
        bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._gateway.buckets), strict=True))
        seconds.add_metric([self._run], buckets, self._gateway.seconds)
        yield from (opened, requests, seconds)
